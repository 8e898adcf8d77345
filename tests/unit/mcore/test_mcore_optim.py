"""The learning-rate schedule, and the CPU backend's own promises."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from moerl.config.schema import OptimSection, ParallelSection
from moerl.errors import ConfigError


def schedule(**fields):
    from moerl.mcore.optim import Schedule

    return Schedule.of(OptimSection(lr=1.0, **fields), 10)


def test_warmup_reaches_the_rate_at_its_last_step():
    rates = [schedule(warmup_steps=4).at(step) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_decay():
    linear = schedule(schedule="linear", constant_steps=2, decay_steps=6, min_lr_fraction=0.2)
    assert [round(linear.at(s), 6) for s in range(8)] == [1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    cosine = schedule(schedule="cosine")
    assert cosine.at(0) == 1.0
    assert cosine.at(5) == pytest.approx(0.5)
    assert cosine.at(10) == cosine.at(99) == 0.0


def test_parallel_sizes_must_fit_the_processes():
    from moerl.mcore.parallel import initialize_parallel

    with pytest.raises(ConfigError, match=r"tensor x pipeline x context = 2 does not divide the 1 processes"):
        initialize_parallel(ParallelSection(tensor=2), 0)
    with pytest.raises(ConfigError, match=r"expert_tensor x expert x pipeline = 4"):
        initialize_parallel(ParallelSection(expert=4), 0)
    with pytest.raises(ConfigError, match=r"parallel\.expert is 0"):
        initialize_parallel(ParallelSection(expert=0), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the backend is a no-op with CUDA")
def test_backend_maps_cuda_to_the_cpu_and_leaves_the_rest():
    import moerl.mcore  # noqa: F401

    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2).to("cuda").device.type == "cpu"
    with torch.device("meta"):
        assert torch.empty(3).is_meta
        assert torch.arange(3).is_meta
    assert torch.zeros(2, dtype=torch.float64).to(torch.float32).dtype is torch.float32
    torch.manual_seed(7)
    first = torch.rand(4)
    state = torch.cuda.get_rng_state()
    second = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), second)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4), first)


PROBE = """
import importlib.util, sys
import torch
import moerl
from moerl.errors import ConfigError

spec = importlib.util.spec_from_file_location("backend", moerl.__path__[0] + "/mcore/cpu_backend.py")
backend = importlib.util.module_from_spec(spec)
spec.loader.exec_module(backend)
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    try:
        backend.check_megatron()
    except ConfigError as error:
        print(error)
    sys.path.pop(0)
    sys.path_importer_cache.clear()
del torch.cuda.Event
try:
    backend.install()
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the backend is a no-op with CUDA")
def test_broken_installations_are_explained(tmp_path):
    """A foreign apex, a TransformerEngine that does not import, one that is too old, another megatron-core, a torch
    without a replaced name.
    """
    apex, engine, other, old = (tmp_path / name for name in "abcd")
    (apex / "apex").mkdir(parents=True)
    (apex / "apex" / "__init__.py").write_text("")
    (engine / "transformer_engine").mkdir(parents=True)
    (engine / "transformer_engine" / "__init__.py").write_text("raise ImportError('libcublas.so.99: no such file')")
    (other / "megatron_core-0.12.0.dist-info").mkdir(parents=True)
    (other / "megatron_core-0.12.0.dist-info" / "METADATA").write_text("Name: megatron-core\nVersion: 0.12.0\n")
    (old / "transformer_engine" / "pytorch").mkdir(parents=True)
    (old / "transformer_engine" / "__init__.py").write_text("__version__ = '2.19.4+cu12'")
    (old / "transformer_engine" / "pytorch" / "__init__.py").write_text("")
    command = [sys.executable, "-c", PROBE, str(apex), str(engine), str(other), str(old)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("the importable 'apex' is not NVIDIA's")
    assert lines[1].startswith("transformer_engine is installed but does not import (libcublas.so.99")
    assert lines[2].startswith("megatron-core is 0.12.0, but 0.19.2 is needed")
    assert lines[3].startswith("transformer_engine is 2.19.4+cu12, but 2.20 or later is needed")
    assert "torch.cuda.Event does not exist in torch" in lines[4]


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("2.19.0", True), ("1.99", True), ("2.20.0", False), ("2.20.2+abc", False), ("3.0", False), (None, True)],
)
def test_a_transformer_engine_whose_adam_loses_steps_is_refused(monkeypatch, version, is_refused):
    import types

    from moerl.mcore import cpu_backend

    engine = types.ModuleType("transformer_engine")
    if version is not None:
        engine.__version__ = version
    monkeypatch.setitem(sys.modules, "transformer_engine", engine)
    if not is_refused:
        cpu_backend._refuse_old_engine()
        return
    said = f"transformer_engine is {version or 'of an unknown version'}, but 2.20 or later is needed"
    with pytest.raises(ConfigError, match=re.escape(said)):
        cpu_backend._refuse_old_engine()


@pytest.mark.parametrize("is_asked_for", [True, False])
@pytest.mark.parametrize("make", ["make_policy", "make_critic"])
def test_gradients_are_reduced_behind_the_backward_pass_where_that_is_asked_for(kit, tiny_folder, make, is_asked_for):
    """With what lets the schedule hold the reduction back until the last micro-batch."""
    learner = getattr(kit, make)(tiny_folder, parallel={"overlap_grad_reduce": is_asked_for})
    (chunk,) = learner._optimizer.chunks
    assert chunk.ddp_config.overlap_grad_reduce is is_asked_for
    assert chunk.config.no_sync_func == (chunk.no_sync if is_asked_for else None)


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"name": "sgd", "distributed": True}, "optim.name=sgd, which has no state to distribute"),
        ({"cpu_offload": True}, "optim.cpu_offload is true without optim.distributed"),
        ({"cpu_offload": True, "distributed": True}, "there is no GPU here whose memory it could relieve"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU cannot do")
def test_what_cannot_be_distributed_or_offloaded_is_refused(optim, message):
    from moerl.mcore.optim import Optimizer

    with pytest.raises(ConfigError, match=message):
        Optimizer(OptimSection(**optim), [], None, num_steps=1)  # pyright: ignore[reportArgumentType] refused before they are read
