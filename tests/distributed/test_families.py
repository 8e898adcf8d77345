"""Every kind of model in a layout of one, of two and of four processes on gloo, held to transformers, in float32; and
the two and four to the one, in a step of training with replayed routes.

All layouts, methods and routings are crossed in `test_layouts.py`, with fewer kinds.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from layout_cases import SGD, case
from ranks import run_worker
from tiny_models import KINDS
from torch import Tensor

from moerl.models.family import family_of
from moerl.models.hf_folder import HFFolder, InMemory, Unfused, read_config
from moerl.replay import compare_gradients

WORKER = Path(__file__).with_name("learner_worker.py")
LAYOUTS: dict[int, dict[str, int]] = {1: {}, 2: {"tensor": 2}, 4: {"tensor": 2, "pipeline": 2}}
"""Processes -> sizes; where there are experts, the tensor ranks also share them out."""
STAGES, TIED = "4_stages", "llama"
"""A layout of four pipeline stages, and the kind in it: its head and its embedding are one tensor on two of them."""
OVERLAP, SHARED = "4_overlap", "shared"
"""Two stages of two tensor ranks whose gradients are reduced during the backward pass, and the kind in them. Experts
are whole on each, so that theirs are reduced between two.
"""
TOLERANCE = 1e-5
"""Absolute for logits, logprobs, weights; of `1 + |value|` for metrics; for gradients of a tensor's largest entry and
a tenth of that of the largest of all."""


def name_of(kind: str) -> str:
    """Of its case."""
    return str(told(kind, "")["name"])


def told(kind: str, folder: str) -> dict[str, Any]:
    """What the worker is told of a kind: one step, of two updates."""
    return {
        **case(folder, "grpo", "R3" if KINDS[kind].layers else "none", SGD, kind),
        "steps": 1,
        "for_transformers": True,
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    models = {kind: str(tiny_models.save_model(folder / kind, kind)) for kind in KINDS}
    for world_size, sizes in LAYOUTS.items():
        layouts = []
        for has_experts in (True, False):
            cases = [told(kind, models[kind]) for kind in KINDS if bool(KINDS[kind].layers) is has_experts]
            experts = {"expert": sizes.get("tensor", 1)} if has_experts else {}
            layouts.append({"name": str(world_size), "sizes": sizes | experts, "cases": cases})
        if world_size == 4:
            layouts.append({"name": STAGES, "sizes": {"pipeline": 4}, "cases": [told(TIED, models[TIED])]})
            overlapped = {**sizes, "overlap_grad_reduce": True}
            layouts.append({"name": OVERLAP, "sizes": overlapped, "cases": [told(SHARED, models[SHARED])]})
        run_worker(WORKER, {"layouts": layouts}, folder, world_size, limit_seconds=300)
    return folder


def read(folder: Path, layout: int | str, kind: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    at = f"{layout}.{name_of(kind)}"
    with np.load(folder / f"{at}.npz") as arrays:
        return json.loads((folder / f"{at}.json").read_text())["metrics"], dict(arrays)


def read_logits(folder: Path, layout: int | str, kind: str) -> dict[str, np.ndarray]:
    """Sample -> [s, v], of the last stage."""
    with np.load(folder / f"{layout}.{name_of(kind)}.logits.npz") as arrays:
        return dict(arrays)


def without_transformers(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What training gave."""
    return {name: value for name, value in found.items() if not name.startswith(("of/", "nll/"))}


@pytest.fixture(scope="module", params=KINDS)
def theirs(request, outcomes) -> tuple[str, dict[str, np.ndarray], dict[str, Tensor]]:
    """(kind, logits, logprobs and routes of every sample, gradients) of transformers' model on the same tokens."""
    kind = str(request.param)
    model, found = tiny_models.make_model(kind), read(outcomes, 1, kind)[1]
    said: dict[str, np.ndarray] = {}
    loss = torch.zeros(())
    for sample in sorted({name.split("/")[1] for name in found if name.startswith("of/")}):
        tokens, mask, weights = (
            torch.from_numpy(found[f"of/{sample}/{part}"]) for part in ("token_ids", "mask", "weights")
        )
        bounds = torch.tensor([0, len(tokens)])
        alone = SimpleNamespace(token_ids=tokens, cu_seqlens=bounds)
        logits, routes = tiny_models.logits_of(model, alone)
        logprobs = tiny_models.logprobs_of(logits, alone)
        loss = loss - (weights * torch.where(mask, logprobs, 0)).sum()
        said[f"of/{sample}/logits"] = logits.detach().numpy()
        said[f"of/{sample}/logprobs"] = logprobs.detach().numpy()
        live = torch.nonzero(mask)[:, 0]
        said[f"of/{sample}/routes"] = routes[live[live > 0] - 1].sort(-1).values.numpy()
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return kind, said, grads


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_logits_routes_and_gradients_are_those_of_transformers(outcomes, world_size, theirs):
    """Through real ranks, by the routers' own choice; of every position every logit, which logprobs of the given tokens
    do not tell: two rows of the head that change places leave those as they are.
    """
    kind, said, grads = theirs
    ours = read(outcomes, world_size, kind)[1]
    logits = read_logits(outcomes, world_size, kind)
    samples = {name.split("/")[1] for name in ours if name.startswith("of/")}
    assert samples == {name.split("/")[1] for name in said}
    assert samples == logits.keys()
    for sample in samples:
        wanted = said[f"of/{sample}/logits"]
        assert logits[sample].shape == wanted.shape == (len(ours[f"of/{sample}/token_ids"]), 54)
        assert np.abs(logits[sample] - wanted).max() < TOLERANCE, sample
        assert np.abs(ours[f"of/{sample}/logprobs"] - said[f"of/{sample}/logprobs"]).max() < TOLERANCE, sample
        if KINDS[kind].layers:
            assert np.array_equal(ours[f"of/{sample}/routes"], said[f"of/{sample}/routes"]), sample
    hf = read_config(outcomes / kind)
    family = family_of(hf)
    source = Unfused(InMemory(grads), family.fused_slices(hf))
    buffers = {name for rule in family.weight_rules(hf) if rule.is_buffer for name in rule.hf_names}
    made = {name.removeprefix("nll/"): torch.from_numpy(value) for name, value in ours.items() if "nll/" in name}
    wanted = {name: source.get(name) for name in HFFolder(outcomes / kind).names() - buffers}
    gaps = compare_gradients(wanted, made)
    largest = max(gap.largest for gap in gaps)
    assert largest > 0
    worst = max(gap.difference / (gap.largest + 0.1 * largest) for gap in gaps)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_weights_and_metrics_are_those_of_one_process(outcomes, world_size, kind):
    metrics, alone = read(outcomes, 1, kind)
    others, together = read(outcomes, world_size, kind)
    hold_together(*(without_transformers(found) for found in (alone, together)))
    for step, (a, b) in enumerate(zip(metrics, others, strict=True)):
        assert a.keys() == b.keys()
        assert {"loss", "optim/grad_norm"} <= a.keys()
        assert ("route_update/dev_p90" in a) is (KINDS[kind].layers > 0)
        for name in {"loss", "optim/grad_norm", "route/replay_coverage", "route_update/dev_p90"} & a.keys():
            assert abs(a[name] - b[name]) <= TOLERANCE * (1 + abs(a[name])), (step, name)


def hold_together(alone: dict[str, np.ndarray], together: dict[str, np.ndarray]) -> None:
    """Gradients and weights."""
    assert alone.keys() == together.keys()
    grads = [key for key in alone if key.startswith("grad/")]
    assert len(grads) > 30
    largest = max(np.abs(alone[key]).max() for key in grads)
    for key, value in alone.items():
        allowed = TOLERANCE * (np.abs(value).max() + 0.1 * largest) if key.startswith("grad/") else TOLERANCE
        assert np.abs(together[key] - value).max() <= allowed, key


def test_a_tied_model_between_stages_that_have_neither_end(outcomes):
    """Megatron-Bridge 954, Megatron-LM 5737: stages in the middle asked for the embedding, or each took itself for the
    first.
    """
    hold_together(*(without_transformers(read(outcomes, layout, TIED)[1]) for layout in (1, STAGES)))
    alone, together = (read_logits(outcomes, layout, TIED) for layout in (1, STAGES))
    assert alone.keys() == together.keys()
    assert all(np.abs(together[sample] - rows).max() < TOLERANCE for sample, rows in alone.items())


def test_gradients_reduced_during_the_backward_pass_of_tensor_ranks_in_a_pipeline(outcomes):
    hold_together(*(without_transformers(read(outcomes, layout, SHARED)[1]) for layout in (1, OVERLAP)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_routes_before_the_first_update_are_those_of_one_process(outcomes, world_size, kind):
    alone, together = (routes(outcomes, size, kind) for size in (1, world_size))
    if not KINDS[kind].layers:
        assert not alone
        assert not together
        return
    assert len(alone) == 12
    assert alone.keys() == together.keys()
    for sample, chosen in alone.items():
        assert np.array_equal(chosen, together[sample]), sample


def routes(folder: Path, world_size: int, kind: str) -> dict[str, np.ndarray]:
    """Of every sample, from the data ranks that had it."""
    found: dict[str, np.ndarray] = {}
    for path in folder.glob(f"{world_size}.{name_of(kind)}.routes.*.npz"):
        with np.load(path) as arrays:
            found |= dict(arrays)
    return found
