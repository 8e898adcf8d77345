"""The whole loop on a model without experts: trainer and engine agree, weights move, and nothing speaks of routes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from moerl.build import build_run
from moerl.configure import load
from moerl.finish import finish_run
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
    "checkpoint.export_hf=true",
    "checkpoint.export_dtype=fp32",
    "checkpoint.interval_steps=1",
    "checkpoint.export_interval_steps=2",
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def save_dense(folder: Path, *, is_tied: bool) -> Path:
    """A random model; a tied one's file holds the embedding a second time, as the head."""
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
        tie_word_embeddings=is_tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    if is_tied:
        tensors = load_file(folder / "model.safetensors")
        assert HEAD not in tensors
        save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("minibatches", "is_tied"), [(1, False), (2, True)])
def test_it_trains_and_exports_the_tensors_that_it_began_with(tmp_path, minibatches, is_tied):
    """With one minibatch nothing is scored before the update, which then holds the two sides to each other."""
    model = save_dense(tmp_path / "model", is_tied=is_tied)
    where = (f"model.path={model}", f"run.output_dir={tmp_path}", "run.name=dense")
    settings = (*SETTINGS, *where, f"batch.num_minibatches={minibatches}")
    made = build_run(load(DEMO / "base.yaml", list(settings)))
    assert made is not None
    try:
        train(made.rooms, made.schedule, made.resume_from)
        finish_run(made.cfg, made.folder, made.rooms.policy, 0.0)
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
    assert before.names() == after.keys() | ({HEAD} if is_tied else set())
    assert all(not torch.equal(before.get(name), after[name]) for name in (EMBEDDING, "model.norm.weight"))
    for folder in (made.folder / "hf", made.folder / "exports" / "step_000002"):
        exported = HFFolder(folder)
        assert exported.names() == before.names()
        assert torch.equal(exported.get(EMBEDDING), after[EMBEDDING])
        assert torch.equal(exported.get(HEAD), after[EMBEDDING if is_tied else HEAD])
