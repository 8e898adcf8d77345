"""How tokens reach their experts, and when gradients are reduced, change no number: two processes on gloo and one.

Nor do they change how the balancing bias moves, or what the engine's likeliest tokens get.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from layout_cases import OF_A_LAYOUT, WIDE
from ranks import run_worker
from safetensors.torch import load_file

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
    "overlap_context": {"context": 2, "overlap_grad_reduce": True},
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
MOVING = {"alltoall": "selective", "context": "full", "pipeline": "full", "overlap": "none", "interleaved": "none"}
"""Layouts in which the balancing bias moves, and their recomputation."""
RATE = 0.01
MOVES = 6
"""Of three steps of two minibatches."""
BIAS = "e_score_correction_bias"


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
    tiny_models.save_model(folder / "sigmoid", "sigmoid")
    alone = [{"name": "alone", "sizes": {}, "cases": [case(folder, "none"), moving(folder, "none")]}]
    together = [
        {"name": name, "sizes": sizes, "cases": [case(folder, RECOMPUTE.get(name, "none"))]}
        for name, sizes in LAYOUTS.items()
    ]
    for layout in together:
        layout["cases"] += [moving(folder, MOVING[name]) for name in MOVING if name == layout["name"]]
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


def moving(folder: Path, recompute: str) -> dict:
    """A bias that moves, and a mask that reads the engine's likeliest tokens.

    Of three answers one minibatch has two and the other one, for which a second data rank runs a filler; their lengths
    are odd, so that slices of the context and of tensor ranks are filled up.
    """
    kind = tiny_models.KINDS["sigmoid"]
    shape = {"layers": kind.layers, "experts": kind.experts, "topk": kind.topk, "vocab": 54, "likeliest": 3}
    return {
        **case(folder, recompute),
        "name": "moving",
        "preset": "dppo_tv",
        "algorithm": {"trust": {"name": "div_mask", "kind": "topk_tv", "delta": 0.05, "cap": 10.0}},
        "routing": "none",
        "model": str(folder / "sigmoid"),
        "model_options": {"router_bias_update_rate": RATE},
        "shape": shape,
        "lengths": (17, 21, 29),
        "budget": 30,
    }


def read(folder: Path, layout: str, name: str = "grpo") -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    with np.load(folder / f"{layout}.{name}.npz") as arrays:
        return json.loads((folder / f"{layout}.{name}.json").read_text())["metrics"], dict(arrays)


def likeliest(folder: Path, layout: str) -> dict[str, np.ndarray]:
    """Of every sample [s, k], from the data ranks that had it."""
    found: dict[str, np.ndarray] = {}
    for path in folder.glob(f"{layout}.moving.likeliest.*.npz"):
        with np.load(path) as arrays:
            found |= dict(arrays)
    return found


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


@pytest.mark.parametrize("layout", MOVING)
def test_the_balancing_bias_moves_as_in_one_process(outcomes, layout):
    """To the bit: by the rate, toward equal loads, which are whole numbers of tokens."""
    before = load_file(outcomes / "sigmoid" / "model.safetensors")
    _, alone = read(outcomes, "alone", "moving")
    _, together = read(outcomes, layout, "moving")
    biases = [key for key in alone if key.endswith(BIAS)]
    assert len(biases) == tiny_models.KINDS["sigmoid"].layers
    for key in biases:
        assert np.array_equal(together[key], alone[key]), key
        moves = (alone[key] - before[key.removeprefix("weight/")].numpy()) / RATE
        assert np.abs(moves - moves.round()).max() < 1e-3
        assert 2 < np.abs(moves).max() < MOVES + 0.5
    for key, value in alone.items():
        allowed = 2e-5 * np.abs(value).max() + 1e-9 if key.startswith("grad/") else 2e-5
        assert np.abs(together[key] - value).max() <= allowed, key


@pytest.mark.parametrize("layout", MOVING)
def test_the_likeliest_tokens_get_what_one_process_gives_them(outcomes, layout):
    alone, together = likeliest(outcomes, "alone"), likeliest(outcomes, layout)
    assert alone.keys() == together.keys() == {"0", "1", "2"}
    for sample, values in alone.items():
        assert values.shape[1] == 3
        assert (values < -0.5).any()
        assert np.abs(together[sample] - values).max() <= 2e-5, sample
    for step, (a, b) in enumerate(zip(*(read(outcomes, name, "moving")[0] for name in ("alone", layout)), strict=True)):
        assert a.keys() == b.keys()
        assert "pg/clip_high" in a
        for metric in a.keys() - OF_A_LAYOUT:
            allowed = WIDE.get(metric, 2e-5) * (1 + abs(a[metric]))
            assert abs(b[metric] - a[metric]) <= allowed, (step, metric, a[metric], b[metric])
