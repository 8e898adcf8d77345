"""The whole loop on a model without experts: trainer and engine agree, weights move, and nothing speaks of routes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from moerl.build import build_run
from moerl.configure import load
from moerl.loop import train
from moerl.models.hf_folder import HFFolder

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"
SETTINGS = (
    "run.num_steps=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "reward.rewards=[{name: regex_match, pattern: '([0-9])'}]",
    "algorithm.preset=reinforce",
    "optim.warmup_steps=0",
    "evaluation.sets.0.limit=4",
    "evaluation.interval_steps=2",
    "telemetry.progress=off",
    "telemetry.report=false",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "model"
    shutil.copytree(DEMO / "policy_init", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=json.loads((DEMO / "policy_init" / "config.json").read_text())["vocab_size"],
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("minibatches", [1, 2])
def test_it_trains(model, tmp_path, minibatches):
    """With one minibatch nothing is scored before the update, which then holds the two sides to each other."""
    where = (f"model.path={model}", f"run.output_dir={tmp_path}", "run.name=dense")
    settings = (*SETTINGS, *where, f"batch.num_minibatches={minibatches}")
    made = build_run(load(DEMO / "base.yaml", list(settings)))
    assert made is not None
    try:
        train(made.rooms, made.schedule, made.resume_from)
    finally:
        made.close()
    rows = [json.loads(line) for line in (tmp_path / "dense" / "metrics.jsonl").read_text().splitlines()]
    (first,) = [row for row in rows if "contract/holds" in row]
    assert first["contract/holds"] == 1.0
    assert first["contract/judged_fraction"] == 1.0
    assert first["contract/logp_gap"] < 1e-5
    assert rows[-1]["mm/logp_abs_max"] < 1e-3
    assert not [name for row in rows for name in row if name.startswith(("route", "load/"))]
    before = HFFolder(model)
    after = dict(made.rooms.policy.export())
    assert before.names() == after.keys()
    assert any(not torch.equal(before.get(name), after[name]) for name in before.names())
