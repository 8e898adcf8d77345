"""The precision of what servers are sent, read from the folders that they load: of a run, and of an evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from quantised_folders import SETTINGS, blocks_of, edit_config, is_linear, plain_of, read_files, write_files
from safetensors.torch import load_file
from served_runs import SERVED, served
from torch import Tensor

from moerl.__main__ import main
from moerl.rollout.fake_engine.serving import FakeServer

POLICY = Path("configs/demo/policy")
HELD = "evaluation.sets=[{name: held, source: {name: file, path: configs/demo/data/heldout.jsonl}, limit: 2}]"
ROUTER = ".mlp.gate.weight"
SCALE = "_scale_inv"


class Watched:
    """A run, and each version that its server was sent, as it lies in the run's folder before the step that uses it."""

    def __init__(self, folder: Path, url: str, *overrides: str) -> None:
        self.tensors: dict[int, dict[str, Tensor]] = {}
        self.configs: dict[int, dict[str, Any]] = {}
        self.indices: dict[int, dict[str, str]] = {}
        self._folder = folder / "engine_weights"
        served(folder, [url], "run.num_steps=2", *overrides, watcher=self._look)

    def _look(self, step: int, groups: Any) -> None:
        if groups is None:
            version = self._folder / str(step - 1)
            self.tensors[step - 1] = read_files(version)
            self.configs[step - 1] = json.loads((version / "config.json").read_text())
            index = json.loads((version / "model.safetensors.index.json").read_text())
            self.indices[step - 1] = index["weight_map"]


def digest(server: FakeServer) -> str:
    """Of the files that it loaded last."""
    return server.call(lambda app: app.state.digest.hexdigest())


def rounded(tensor: Tensor) -> bool:
    return bool((tensor == tensor.bfloat16().float()).all())


def test_servers_get_bfloat16_and_routers_as_the_learner_has_them(tmp_path: Path) -> None:
    stored = load_file(POLICY / "model.safetensors")
    with FakeServer(SERVED) as server:
        run = Watched(tmp_path / "run", server.url, "weight_sync.precision=bf16")
    assert set(run.tensors) == {0, 1}
    for version, sent in run.tensors.items():
        types = {name: torch.float32 if name.endswith(ROUTER) else torch.bfloat16 for name in stored}
        assert {name: tensor.dtype for name, tensor in sent.items()} == types
        assert run.configs[version]["torch_dtype"] == "bfloat16"
    for name, tensor in stored.items():
        assert torch.equal(run.tensors[0][name], tensor.to(run.tensors[0][name].dtype)), name
    trained = [tensor for name, tensor in run.tensors[1].items() if name.endswith(ROUTER)]
    assert trained
    assert not any(rounded(tensor) for tensor in trained), "they would lose something"


def fp8_policy(folder: Path) -> dict[str, Tensor]:
    """The demo's policy in FP8 blocks; returns the plain tensors that it stands for."""
    shutil.copytree(POLICY, folder)
    plain, stored = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for name, tensor in list(plain.items()):
        stored[name] = tensor
        if is_linear(name, tensor.shape):
            stored[name], stored[name + SCALE] = blocks_of(tensor)
            plain[name] = plain_of(stored[name], stored[name + SCALE])
    write_files(folder, {"a.safetensors": stored})
    edit_config(folder, quantization_config=SETTINGS)
    return plain


def test_servers_of_a_folder_in_fp8_get_blocks_their_scales_and_the_word_for_it(tmp_path: Path) -> None:
    plain = fp8_policy(tmp_path / "fp8")
    blocks = {name for name, tensor in plain.items() if is_linear(name, tensor.shape)}
    given = (f"model.path={tmp_path / 'fp8'}", "weight_sync.precision=fp8_block")
    with FakeServer(SERVED) as server:
        run = Watched(tmp_path / "run", server.url, *given)
    for version, sent in run.tensors.items():
        assert set(sent) == set(run.indices[version]) == {*plain, *(name + SCALE for name in blocks)}
        assert {name for name, tensor in sent.items() if tensor.dtype == torch.float8_e4m3fn} == blocks
        assert run.configs[version]["quantization_config"] == SETTINGS
        assert run.configs[version]["torch_dtype"] == "bfloat16", "of what is not in blocks"
    for name in blocks:
        first = plain_of(run.tensors[0][name], run.tensors[0][name + SCALE])
        torch.testing.assert_close(first, plain[name], rtol=2**-4, atol=float(plain[name].abs().max()) * 2**-9)


def test_an_evaluation_sends_what_the_run_sent(tmp_path: Path) -> None:
    given = ("weight_sync.precision=bf16", "checkpoint.interval_steps=1", HELD)
    with FakeServer(SERVED) as server:
        served(tmp_path / "run", [server.url], "run.num_steps=1", *given)
        sent = digest(server)
        server.restart()
        assert digest(server) != sent
        assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
        assert digest(server) == sent
