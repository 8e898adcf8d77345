"""The learner is the same in every parallel layout: four processes on gloo against one, in float32.

Every pair of layout and routing, and of method and routing, occurs. One launch runs all layouts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("learner_worker.py")
LIMIT_SECONDS = 420

LAYOUTS = {
    "dp4": {},
    "ep4": {"expert": 4},
    "tp2_ep2_dp2": {"tensor": 2, "expert": 2},
    "pp2_ep2_dp2": {"pipeline": 2, "expert": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_ep2_pp2": {"tensor": 2, "expert": 2, "pipeline": 2},
    "pp2_vpp2_dp2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2_dp2": {"context": 2},
    "cp4_ep2": {"context": 4, "expert": 2},
    "cp2_tp2_ep2": {"context": 2, "tensor": 2, "expert": 2},
    "cp2_pp2": {"context": 2, "pipeline": 2},
    "etp2_ep2": {"expert": 2, "expert_tensor": 2},
    "tp2_etp2_dp2": {"tensor": 2, "expert_tensor": 2},
}
BALANCED = ("tp2_pp2", "cp2_tp2_ep2", "cp2_pp2")
"""Also run with the balancing loss. It is a mean over micro-batches and data ranks, so one data rank is compared."""
METHODS = {
    "grpo": {},
    "gspo": {},
    "gmpo": {},
    "rspo": {},
    "dapo": {"correction": {"name": "tis"}},
}
ROUTINGS = ("none", "R2", "R3")
SHAPE = {"layers": 3, "experts": 8, "topk": 3, "vocab": 54}

TOLERANCE = 2e-5
"""Of `1 + |value|`; of a tensor's largest entry for gradients; absolute for weights."""
OF_A_LAYOUT = {"data/padding_fraction"}
"""Metrics that are not the same in every layout."""
WIDE = {"mm/chi2_seq": 2e-4}
"""Squares of exponentials of summed log-ratios: their last digits are those of the sum, times the value."""


def save_model(folder: Path) -> Path:
    """Qwen3-MoE, random: a dense layer first, a vocabulary that two ranks do not divide evenly when padded."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": SHAPE["vocab"],
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": SHAPE["layers"] + 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "moe_intermediate_size": 24,
        "num_experts": SHAPE["experts"],
        "num_experts_per_tok": SHAPE["topk"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            scale = 0.6 if "gate.weight" in name else 0.12
            parameter.copy_(1 + 0.1 * noise if "norm" in name else noise * scale)
    model.save_pretrained(folder)
    return folder


def case(model: str, method: str, routing: str, optimizer: str) -> dict:
    return {
        "name": f"{method}.{routing}.{optimizer}",
        "preset": method,
        "algorithm": METHODS[method],
        "routing": routing,
        "model": model,
        "optimizer": "sgd" if optimizer == "sgd" else "adam",
        "model_options": {"aux_loss_coefficient": 0.02} if optimizer == "aux" else {},
        "lr": 0.02 if optimizer == "sgd" else 2e-4,
        "shape": SHAPE,
    }


def names_of(layout: str) -> list[tuple[str, str, str]]:
    """The cases of a layout: with every routing another method, so that seven layouts meet every pair."""
    turn = list(LAYOUTS).index(layout)
    methods = list(METHODS)
    adam = [(methods[(turn + i) % len(methods)], routing, "adam") for i, routing in enumerate(ROUTINGS)]
    balanced = [("grpo", "none", "aux")] if layout in BALANCED else []
    return [*adam, ("gspo", "R3", "sgd"), *balanced]


def start(plan: dict, folder: Path, processes: int) -> None:
    path = folder / f"plan_{processes}.json"
    path.write_text(json.dumps(plan))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(WORKER), str(path), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    assert done.returncode == 0, "\n".join(errors[:8] or done.stderr.splitlines()[-20:])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    model = str(save_model(folder / "model"))
    layouts = [
        {"name": name, "sizes": sizes, "cases": [case(model, *names) for names in names_of(name)]}
        for name, sizes in LAYOUTS.items()
    ]
    every = sorted({names for name in LAYOUTS for names in names_of(name)})
    alone = [{"name": "alone", "sizes": {}, "cases": [case(model, *names) for names in every]}]
    start({"layouts": alone}, folder, 1)
    start({"layouts": layouts}, folder, 4)
    return folder


def read(folder: Path, layout: str, name: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    record = json.loads((folder / f"{layout}.{name}.json").read_text())
    with np.load(folder / f"{layout}.{name}.npz") as arrays:
        return record["metrics"], dict(arrays)


CASES = [(layout, ".".join(names)) for layout in LAYOUTS for names in names_of(layout)]


def test_every_pair_occurs():
    seen = {(layout, routing) for layout in LAYOUTS for _, routing, _ in names_of(layout)}
    assert seen == {(layout, routing) for layout in LAYOUTS for routing in ROUTINGS}
    pairs = {(method, routing) for layout in LAYOUTS for method, routing, _ in names_of(layout)}
    assert pairs == {(method, routing) for method in METHODS for routing in ROUTINGS}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_metrics_of_three_steps_are_those_of_one_process(outcomes, layout, name):
    alone, _ = read(outcomes, "alone", name)
    together, _ = read(outcomes, layout, name)
    for step, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert a.keys() == b.keys()
        assert "loss" in a
        assert "optim/grad_norm" in a
        assert "route_update/dev_p90" in a
        for metric in a.keys() - OF_A_LAYOUT:
            value = a[metric]
            allowed = WIDE.get(metric, TOLERANCE) * (1 + abs(value))
            assert abs(b[metric] - value) <= allowed, (step, metric, value, b[metric])


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_gradients_of_the_first_minibatch_are_those_of_one_process(outcomes, layout, name):
    alone, together = read(outcomes, "alone", name)[1], read(outcomes, layout, name)[1]
    assert alone.keys() == together.keys()
    grads = [key for key in alone if key.startswith("grad/")]
    assert len(grads) > 80
    for key in grads:
        largest = np.abs(alone[key]).max()
        assert np.abs(together[key] - alone[key]).max() <= TOLERANCE * largest + 1e-9, key


@pytest.mark.parametrize(("layout", "name"), [pair for pair in CASES if pair[1].endswith("sgd")])
def test_weights_after_three_steps_of_sgd_are_those_of_one_process(outcomes, layout, name):
    alone, together = read(outcomes, "alone", name)[1], read(outcomes, layout, name)[1]
    weights = [key for key in alone if key.startswith("weight/")]
    assert len(weights) > 80
    for key in weights:
        assert np.abs(together[key] - alone[key]).max() <= TOLERANCE, key
