"""tools/inspect_checkpoint.py on checkpoints of two ranks made by hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moerl.checkpoint import CheckpointStore
from moerl.shards import Shard, write_rank

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "inspect_checkpoint.py"


def _tool():
    spec = importlib.util.spec_from_file_location("inspect_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _tool()
EXPERTS = "decoder.layers.{}.mlp.experts.experts.linear_fc2.weight"


class TwoRanks:
    """Rank r holds experts 2 r and 2 r + 1 of four, in two layers; rank 0 the embedding and the norm."""

    def save(self, folder):
        for rank in (0, 1):
            shards = [
                Shard(f"{kind}/{EXPERTS.format(layer)}", (4, 3, 5), (expert, 0, 0), torch.ones(1, 3, 5) * expert)
                for kind in ("weights", "optimizer/exp_avg")
                for layer in (0, 1)
                for expert in (2 * rank, 2 * rank + 1)
            ]
            if rank == 0:
                shards.append(Shard("weights/embedding.word_embeddings.weight", (7, 5), (0, 0), torch.zeros(7, 5)))
                shards.append(Shard("weights/decoder.final_layernorm.weight", (5,), (0,), torch.zeros(5)))
            layout = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 2, "etp": 1, "virtual_pipeline": 0}
            state = {"world_size": 2, "layout": layout, "counters": {"version": 6}, "optimizer_updates": 12, "rng": {}}
            write_rank(folder, rank, shards, state, {})


@pytest.fixture
def run(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, model_id="a" * 64, config_id="c" * 64)
    for step in (3, 6):
        store.save(step, TwoRanks(), {"step": step})  # pyright: ignore[reportArgumentType] it only saves
    return tmp_path


def test_everything_is_told_as_json(run, capsys):
    assert TOOL.main([str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(run / "checkpoints" / "step_000006")
    assert (found["step"], found["model_id"], found["config_id"]) == (6, "a" * 64, "c" * 64)
    assert (found["checksums"], found["damage"]) == ("verified", [])
    files = {path: (run / "checkpoints" / "step_000006" / path).stat().st_size for path in found["files"]}
    assert found["files"] == files
    assert len(files) == 5
    policy = found["models"]["policy"]
    assert found["models"].keys() == {"policy"}
    assert policy["ranks"] == 2
    assert policy["layout"]["ep"] == 2
    assert policy["counters"] == {"version": 6}
    assert policy["optimizer_updates"] == 12
    assert policy["parameters"] == 2 * 60 + 35 + 5
    assert policy["parameters_by_kind"] == {"experts": 120, "embedding": 35, "norm": 5}
    assert policy["bytes"] == {"weights": 4 * 160, "optimizer exp_avg": 4 * 120}
    experts = {"shape": [4, 3, 5], "dtype": "float32", "parts": 4}
    assert policy["tensors"][f"weights/{EXPERTS.format(1)}"] == experts
    assert len(policy["tensors"]) == 6


def test_the_text_puts_layers_together_or_lists_them(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert TOOL.main([str(run / "checkpoints" / "step_000003")]) == 0
    text = capsys.readouterr().out
    for part in ("step 3", "ep 2", "160 parameters", "12 optimizer updates", "verified, 5 files", EXPERTS.format("*")):
        assert part in text
    assert TOOL.main([str(run / "checkpoints"), "--names"]) == 0
    text = capsys.readouterr().out
    assert "step 6" in text
    assert all(EXPERTS.format(layer) in text for layer in (0, 1))
    assert "exp_avg/" not in text


def test_damage_is_found_and_nothing_of_it_is_read(run, capsys):
    folder = run / "checkpoints" / "step_000006"
    path = folder / "learner" / "rank_00001.json"
    path.write_text(path.read_text().replace('"version": 6', '"version": 7'))
    assert TOOL.main([str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == {}
    told = [f"{path} does not match its SHA-256 in the manifest: it is damaged"]
    assert (found["checksums"], found["damage"]) == ("damaged", told)
    assert TOOL.main([str(run), "--skip-checksums"]) == 0
    assert "skipped" in capsys.readouterr().out
    assert TOOL.main([str(run / "checkpoints" / "step_000003")]) == 0


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    assert TOOL.main([str(tmp_path)]) == 1
    assert "is no checkpoint (step_000010), and no run or folder that holds one" in capsys.readouterr().err
    (tmp_path / "step_000001").mkdir()
    assert TOOL.main([str(tmp_path)]) == 1
    assert "manifest.json is damaged" in capsys.readouterr().err


def test_it_loads_neither_megatron_nor_a_process_group(run):
    code = (
        "import runpy, sys; sys.argv = ['inspect_checkpoint', sys.argv[1]]\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "import torch.distributed as dist\n"
        "assert 'megatron' not in sys.modules and 'transformers' not in sys.modules and not dist.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
