"""A whole run on a model with layers of multi-token prediction: what it writes down has all tensors of the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from prediction_layers import save_with_prediction
from quantised_folders import edit_config, read_files

from moerl.build import build_run
from moerl.configure import load
from moerl.convert.compare import compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options
from moerl.convert.inspection import damaged_files
from moerl.convert.places import find
from moerl.finish import finish_run
from moerl.loop import train

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
SETTINGS = (
    "run.num_steps=2",
    "run.name=predicting",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "reward.rewards=[{name: regex_match, pattern: '([0-9])'}]",
    "algorithm.preset=reinforce",
    "optim.warmup_steps=0",
    "batch.num_minibatches=2",
    "evaluation.sets.0.limit=4",
    "evaluation.interval_steps=2",
    "checkpoint.export_hf=true",
    "checkpoint.export_dtype=fp32",
    "checkpoint.interval_steps=1",
    "checkpoint.export_interval_steps=1",
    "telemetry.progress=off",
    "telemetry.report=false",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("predicting") / "model"
    shutil.copytree(DEMO / "policy_init", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocab = json.loads((DEMO / "policy_init" / "config.json").read_text())["vocab_size"]
    save_with_prediction(folder, "sigmoid", vocab_size=vocab)
    edit_config(folder, eos_token_id=1, pad_token_id=0)
    return folder


def test_every_export_of_a_run_has_them_as_the_model_had(model, tmp_path):
    made = build_run(load(DEMO / "base.yaml", [*SETTINGS, f"model.path={model}", f"run.output_dir={tmp_path}"]))
    assert made is not None
    try:
        train(made.rooms, made.schedule, made.resume_from)
        finish_run(made.cfg, made.folder, made.rooms.policy, 0.0)
    finally:
        made.close()
    original = read_files(model)
    predicted = {name for name in original if name.startswith(("model.layers.4.", "model.layers.5."))}
    assert len(predicted) > 100
    export_checkpoint(find(made.folder), tmp_path / "exported", Options())
    exports = made.folder / "exports"
    for folder in (made.folder / "hf", exports / "step_000001", exports / "step_000002", tmp_path / "exported"):
        found = read_files(folder)
        assert found.keys() == original.keys()
        assert not damaged_files(find(folder))
        assert json.loads((folder / "moerl_manifest.json").read_text())["carried_is_older"]
        for name, tensor in original.items():
            if name in predicted:
                assert torch.equal(found[name], tensor), name
    assert not compare_weights(find(made.folder), find(made.folder / "hf")).differences
