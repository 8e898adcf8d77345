"""SGLang's CPU shim: inert unless asked for, loud where sglang is another, right for experts of other ranks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from collections import namedtuple

import pytest
import torch

from moerl.rollout.sglang.servers import SHIM

TopK = namedtuple("TopK", "topk_weights topk_ids router_logits")


@pytest.fixture(scope="module")
def shim():
    spec = importlib.util.spec_from_file_location("moerl_sglang_shim", SHIM / "sitecustomize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_sglang(folder, *, version="0.5.23", modules=("mem_cache/pool_host/common", "layers/moe/fused_moe_native")):
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    for name in modules:
        path = folder / "sglang" / "srt" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text("")
    (folder / "sglang").mkdir(exist_ok=True)
    for path in [folder / "sglang", *(p for p in (folder / "sglang").rglob("*") if p.is_dir())]:
        (path / "__init__.py").write_text("")
    return folder


def run(code, folder=None, *, flag="1"):
    """In a fresh Python that has the shim on its path, as a server has."""
    path = ":".join(str(part) for part in (SHIM, folder) if part)
    environment = {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": flag}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_without_the_flag_it_does_nothing(tmp_path):
    folder = fake_sglang(tmp_path, version="9.9.9")
    assert run("import sglang", folder, flag="0").returncode == 0
    assert "No module named 'sgl_kernel'" in run("import sgl_kernel", flag="0").stderr


def test_another_version_is_refused(tmp_path):
    done = run("import sglang", fake_sglang(tmp_path, version="9.9.9"))
    assert "CPU shim: sglang is 9.9.9, but it was made for 0.5.23: run `make sglang`" in done.stderr


def test_a_module_that_has_moved_is_refused(tmp_path):
    done = run("import sglang", fake_sglang(tmp_path, modules=("mem_cache/pool_host/common",)))
    assert "has no module sglang.srt.layers.moe.fused_moe_native" in done.stderr


def test_a_name_that_is_gone_is_refused(tmp_path):
    done = run("import sglang.srt.mem_cache.pool_host.common", fake_sglang(tmp_path))
    assert "ALLOC_MEMORY_FUNCS does not exist; it was made for sglang 0.5.23" in done.stderr


def test_kernels_are_named_when_they_are_called():
    done = run("from sgl_kernel import transfer_kv; print(transfer_kv.__name__); transfer_kv(1)")
    assert done.stdout == "transfer_kv\n"
    assert "NotImplementedError: sgl_kernel.transfer_kv was called on a CPU" in done.stderr


def test_kernels_that_are_installed_come_first(tmp_path):
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("mine = 1")
    assert run("import sgl_kernel; print(sgl_kernel.mine)", tmp_path).stdout == "1\n"


def plain_moe(layer, x, topk_output, config):
    """Like SGLang's: ids are rows of `layer`, [experts, h, h]; -1 would take the last one."""
    weights, ids, _ = topk_output
    assert (ids >= 0).all()
    return torch.einsum("tkoi,ti,tk->to", layer[ids], x, weights)


def test_experts_of_two_ranks_add_up_to_all(shim):
    module = types.SimpleNamespace(moe_forward_native=plain_moe)
    shim._after_moe(module)
    torch.manual_seed(0)
    tokens, experts, hidden, top = 50, 6, 4, 3
    layer = torch.randn(experts, hidden, hidden, dtype=torch.float64)
    x, weights = torch.randn(tokens, hidden, dtype=torch.float64), torch.rand(tokens, top, dtype=torch.float64)
    ids = torch.rand(tokens, experts).topk(top).indices
    ids[0] = torch.tensor([0, 1, 2])  # nothing on the second rank
    whole = plain_moe(layer, x, TopK(weights, ids, None), None)
    torch.testing.assert_close(module.moe_forward_native(layer, x, TopK(weights, ids, None), None), whole)
    half = experts // 2
    local = [ids.masked_fill(ids >= half, -1), (ids - half).masked_fill(ids < half, -1)]
    parts = [
        module.moe_forward_native(layer[rank * half : (rank + 1) * half], x, TopK(weights, local[rank], None), None)
        for rank in range(2)
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert (parts[1][0] == 0).all()


def test_a_rank_without_any_token_gives_zeros(shim):
    module = types.SimpleNamespace(moe_forward_native=plain_moe)
    shim._after_moe(module)
    out = module.moe_forward_native(None, torch.ones(2, 3), TopK(torch.ones(2, 1), torch.full((2, 1), -1), None), None)
    assert torch.equal(out, torch.zeros(2, 3))


def test_host_buffers_come_from_the_heap(shim):
    module = types.SimpleNamespace(ALLOC_MEMORY_FUNCS={})
    shim._after_pool(module)
    buffer = module.ALLOC_MEMORY_FUNCS["cpu"]((2, 3), torch.int32, "cpu", True, None, registration_granularity_bytes=1)
    assert (buffer.shape, buffer.dtype) == ((2, 3), torch.int32)
