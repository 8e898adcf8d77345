"""How tokens reach their experts, and when gradients are reduced, change no number: two processes on gloo and one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_worker

WORKER = Path(__file__).with_name("learner_worker.py")
SHAPE = {"layers": 2, "experts": 4, "topk": 2, "vocab": 30}
LAYOUTS = {
    "alltoall": {"expert": 2, "tensor": 2, "dispatcher": "alltoall"},
    "allgather": {"expert": 2, "tensor": 2, "dispatcher": "allgather"},
    "allgather_full": {"tensor": 2, "dispatcher": "allgather"},
    "context": {"context": 2, "expert": 2},
    "expert_tensor": {"expert_tensor": 2},
    "pipeline": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "overlap": {"expert": 2, "overlap_grad_reduce": True},
    "overlap_interleaved": {"pipeline": 2, "virtual_pipeline": 2, "overlap_grad_reduce": True},
}
RECOMPUTE = {
    "alltoall": "full",
    "allgather": "selective",
    "context": "full",
    "expert_tensor": "selective",
    "pipeline": "full",
    "interleaved": "selective",
    "overlap": "full",
    "overlap_interleaved": "full",
}
"""Recomputation runs along, where replay must serve each micro-batch its own routes again."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("dispatchers")
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=SHAPE["vocab"],
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=SHAPE["layers"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=SHAPE["experts"],
        num_experts_per_tok=SHAPE["topk"],
        norm_topk_prob=True,
        mlp_only_layers=[0, 2],
        tie_word_embeddings=False,
        max_position_embeddings=64,
        initializer_range=0.15,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    alone = [{"name": "alone", "sizes": {}, "cases": [case(folder, "none")]}]
    together = [
        {"name": name, "sizes": sizes, "cases": [case(folder, RECOMPUTE.get(name, "none"))]}
        for name, sizes in LAYOUTS.items()
    ]
    run_worker(WORKER, {"layouts": alone}, folder, 1, limit_seconds=300)
    run_worker(WORKER, {"layouts": together}, folder, 2, limit_seconds=300)
    return folder


def case(folder: Path, recompute: str) -> dict:
    return {
        "name": "grpo",
        "preset": "grpo",
        "routing": "R3",
        "model": str(folder / "model"),
        "optimizer": "sgd",
        "lr": 0.02,
        "shape": SHAPE,
        "precision": {"recompute": recompute},
    }


def read(folder: Path, layout: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    with np.load(folder / f"{layout}.grpo.npz") as arrays:
        return json.loads((folder / f"{layout}.grpo.json").read_text())["metrics"], dict(arrays)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_weights_and_norms_are_those_of_one_process(outcomes, layout):
    metrics, alone = read(outcomes, "alone")
    others, together = read(outcomes, layout)
    assert alone.keys() == together.keys()
    assert sum(key.startswith("grad/") for key in alone) > 40
    for key, value in alone.items():
        allowed = 2e-5 * np.abs(value).max() + 1e-9 if key.startswith("grad/") else 2e-5
        assert np.abs(together[key] - value).max() <= allowed, key
    for step, (a, b) in enumerate(zip(metrics, others, strict=True)):
        for name in ("loss", "optim/grad_norm", "route/replay_coverage"):
            assert abs(a[name] - b[name]) <= 2e-5 * (1 + abs(a[name])), (step, name)


def test_the_two_dispatchers_agree_with_each_other(outcomes):
    _, first = read(outcomes, "alltoall")
    _, second = read(outcomes, "allgather")
    for key, value in first.items():
        assert np.abs(second[key] - value).max() <= 2e-6 * np.abs(value).max() + 1e-9, key
