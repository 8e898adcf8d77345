"""The learner is the same in every parallel layout: four processes on gloo against one, in float32.

`tests/shared/layout_cases.py` says which combinations of layout, method, routing and router run here, and which more
under the marker `slow`. One launch runs all layouts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from layout_cases import (
    AUX,
    EVEN,
    EVERY_LAYOUT,
    FACTORS,
    LAYOUTS,
    METHODS,
    OF_A_LAYOUT,
    ROUTERS,
    ROUTINGS,
    SGD,
    WIDE,
    Case,
    case,
    pairs_of,
    pairwise_cases,
    quick_cases,
)
from random_samples import LENGTHS, PROMPT
from ranks import run_worker

from moerl.data.packing import plan_packing

WORKER = Path(__file__).with_name("learner_worker.py")
LIMIT_SECONDS = 1800
"""Against a hang alone: four times what two cores take that have nothing else to do."""

BALANCED = ("tp2_pp2", "cp2_tp2_ep2", "cp2_pp2")
"""Also run with the balancing loss, on one data rank."""
BALANCED_EVENLY = ("dp4", "ep4", "pp2_vpp2_dp2", "etp2_ep2")
"""And on several."""
CUT_MOST = (Case("cp2_tp2_ep2", "gspo", "R3", "latent"), Case("cp2_tp2_ep2", "grpo", "R2", "fused"))
"""Also run: a key that all heads share; sinks and windows. Both with few tokens in the running."""
TOLERANCE = 2e-5
"""Of `1 + |value|`; of a tensor's largest entry for gradients; absolute for weights."""

Run = tuple[str, str]
"""Layout and the name of a case in it."""


def runs_of(cases: Sequence[Case], *, all_sgd: bool) -> list[tuple[Case, str]]:
    """Every case with Adam; with plain SGD all, or one of each layout; the balancing loss apart."""
    runs = [(one, "adam") for one in cases]
    runs += [(one, SGD) for i, one in enumerate(cases) if all_sgd or ROUTINGS[i // 6 % 3] == one.routing]
    if all_sgd:
        return runs
    aux = [("softmax", "none"), ("sigmoid", "none"), ("shared", "none")]
    runs += [(one, "adam") for one in CUT_MOST]
    runs += [(Case(name, "grpo", routing, router), AUX) for name, (router, routing) in zip(BALANCED, aux, strict=True)]
    return runs + [(Case(name, "grpo", "none", "softmax"), EVEN) for name in BALANCED_EVENLY]


QUICK = runs_of(quick_cases(), all_sgd=False)
SLOW = runs_of(pairwise_cases(), all_sgd=True)


def name_of(one: Case, optimizer: str) -> str:
    """Of a run within its layout."""
    return f"{one.method}.{one.routing}.{one.router}.{optimizer}"


def run_all(runs: Sequence[tuple[Case, str]], folder: Path, limit: float) -> Path:
    """Every run in its layout, and once alone."""
    models = {
        router: str(tiny_models.save_model(folder / router, router)) for router in {run[0].router for run in runs}
    }

    def told(found: Sequence[tuple[Case, str]]) -> list[dict[str, Any]]:
        made = [case(models[c.router], c.method, c.routing, optimizer, c.router) for c, optimizer in found]
        return list({one["name"]: one for one in made}.values())

    layouts = [
        {"name": name, "sizes": sizes, "cases": told([run for run in runs if run[0].layout == name])}
        for name, sizes in EVERY_LAYOUT.items()
    ]
    alone = {"name": "alone", "sizes": {}, "cases": told(runs)}
    run_worker(WORKER, {"layouts": [alone]}, folder, 1, limit_seconds=limit)
    run_worker(WORKER, {"layouts": layouts}, folder, 4, limit_seconds=limit)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    return run_all(QUICK, tmp_path_factory.mktemp("layouts"), LIMIT_SECONDS)


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    return run_all(SLOW, tmp_path_factory.mktemp("pairwise"), 6 * LIMIT_SECONDS)


@pytest.fixture
def outcome(request, run: tuple[str, Run]) -> tuple[Path, str, str]:
    """Where the run's files are; the whole set runs when the first of it is asked for."""
    folder = request.getfixturevalue(run[0])
    return folder, *run[1]


def parameters(wanted: str = "") -> list[Any]:
    """Every run whose name ends with `wanted`; those of the full coverage are slow."""
    found = []
    for kind, runs, marks in (("quick", QUICK, ()), ("slow", SLOW, (pytest.mark.slow,))):
        for one, optimizer in runs:
            if optimizer.endswith(wanted):
                name = name_of(one, optimizer)
                found.append(pytest.param((kind, (one.layout, name)), id=f"{kind}-{one.layout}-{name}", marks=marks))
    return found


def read(folder: Path, layout: str, name: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    record = json.loads((folder / f"{layout}.{name}.json").read_text())
    with np.load(folder / f"{layout}.{name}.npz") as arrays:
        return record["metrics"], dict(arrays)


def routes(folder: Path, layout: str, name: str) -> dict[str, np.ndarray]:
    """Of every sample, from the data ranks that had it."""
    found: dict[str, np.ndarray] = {}
    for path in folder.glob(f"{layout}.{name}.routes.*.npz"):
        with np.load(path) as arrays:
            found |= dict(arrays)
    return found


def test_every_pair_that_must_occur_does():
    quick_ones = quick_cases()
    assert len(quick_ones) <= 40
    assert {(c.layout, c.routing) for c in quick_ones} == {(a, b) for a in LAYOUTS for b in ROUTINGS}
    assert {(c.method, c.routing) for c in quick_ones} == {(a, b) for a in METHODS for b in ROUTINGS}
    assert {(c.router, c.routing) for c in quick_ones} == {(a, b) for a in ROUTERS for b in ROUTINGS}
    met = {pair for one in pairwise_cases() for pair in pairs_of(one)}
    sizes = [len(values) for values in FACTORS]
    assert len(met) == (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2
    with_sgd = [c for c, optimizer in QUICK if optimizer == SGD]
    assert {c.layout for c in with_sgd} == set(LAYOUTS)
    assert {c.method for c in with_sgd} == set(METHODS)
    assert any(c.method == "ppo" and LAYOUTS[c.layout].get("tensor") for c in with_sgd)


@pytest.mark.parametrize("run", parameters())
def test_metrics_of_three_steps_are_those_of_one_process(outcome):
    folder, layout, name = outcome
    alone, _ = read(folder, "alone", name)
    together, _ = read(folder, layout, name)
    expected = {"loss", "optim/grad_norm", "route_update/dev_p90"}
    if name.startswith("ppo"):
        expected |= {"critic/loss", "critic/grad_norm", "critic/explained_variance", "advantage/abs_mean"}
    for step, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert a.keys() == b.keys()
        assert expected <= a.keys()
        for metric in a.keys() - OF_A_LAYOUT:
            value = a[metric]
            allowed = WIDE.get(metric, TOLERANCE) * (1 + abs(value))
            assert abs(b[metric] - value) <= allowed, (step, metric, value, b[metric])
        if ".R3." in name:
            assert 0.6 < b["route/replay_coverage"] < 0.9, "tokens without a route"
    if name.startswith("rspo"):
        assert max(abs(step["route_update/gamma_mean"] - 1) for step in together) > 1e-3, "a factor that does something"


def rows_of(lengths: Sequence[int], ranks: int, cut: str) -> int:
    """Of a pack."""
    if cut == "zigzag":
        return sum(-(-length // (2 * ranks)) * 2 * ranks for length in lengths)
    loads = [0] * ranks
    for length in sorted(lengths, reverse=True):
        loads[loads.index(min(loads))] += length
    return ranks * 2 * -(-max(loads) // 2)


def packs_of(step: int) -> list[list[int]]:
    """The lengths of each micro-batch of a step on one data rank, as the worker asks for them."""
    groups = [i // 2 for i in range(len(LENGTHS))]
    plan = plan_packing(
        LENGTHS,
        groups,
        [length - PROMPT for length in LENGTHS],
        dp_size=1,
        num_minibatches=2,
        num_epochs=1,
        max_tokens_per_microbatch=60,
        seed=step,
    )
    return [[LENGTHS[i] for i in micro] for ranks in plan.assignment for micro in ranks[0]]


@pytest.mark.parametrize("layout", [name for name, sizes in LAYOUTS.items() if "context" in sizes])
def test_padding_is_the_share_of_rows_that_the_context_axis_adds(quick, layout):
    """The zigzag cuts every sequence into twice as many equal parts as it has ranks, and packs then need no more rows;
    of whole sequences every rank has as many rows as the one with the most tokens."""
    sizes = LAYOUTS[layout]
    for name in {name_of(*run) for run in QUICK if run[0].layout == layout}:
        for number, step in enumerate(read(quick, layout, name)[0]):
            packs = [LENGTHS] if sizes["context_cut"] == "zigzag" else packs_of(number)
            rows = sum(rows_of(pack, sizes["context"], sizes["context_cut"]) for pack in packs)
            assert step["data/padding_fraction"] == pytest.approx(1 - sum(LENGTHS) / rows), name
        assert {step["data/padding_fraction"] for step in read(quick, "alone", name)[0]} == {0}


@pytest.mark.parametrize("run", parameters())
def test_gradients_of_the_first_minibatch_are_those_of_one_process(outcome):
    folder, layout, name = outcome
    alone, together = read(folder, "alone", name)[1], read(folder, layout, name)[1]
    assert alone.keys() == together.keys()
    grads = [key for key in alone if key.startswith("grad/")]
    assert len(grads) > 60
    for key in grads:
        largest = np.abs(alone[key]).max()
        assert np.abs(together[key] - alone[key]).max() <= TOLERANCE * largest + 1e-9, key


@pytest.mark.parametrize("run", parameters())
def test_routes_before_the_first_update_are_those_of_one_process(outcome):
    folder, layout, name = outcome
    alone, together = routes(folder, "alone", name), routes(folder, layout, name)
    assert len(alone) == (16 if name.endswith(EVEN) else 12)
    assert alone.keys() == together.keys()
    for sample, chosen in alone.items():
        assert np.array_equal(chosen, together[sample]), sample


@pytest.mark.parametrize("run", parameters(SGD))
def test_weights_after_three_steps_of_sgd_are_those_of_one_process(outcome):
    folder, layout, name = outcome
    alone, together = read(folder, "alone", name)[1], read(folder, layout, name)[1]
    weights = [key for key in alone if key.startswith("weight/")]
    assert len(weights) > (120 if name.startswith("ppo") else 60)
    for key in weights:
        assert np.abs(together[key] - alone[key]).max() <= TOLERANCE, key


@pytest.mark.parametrize("run", [run for run in parameters(SGD) if ".ppo." in f".{run.values[0][1][1]}"])
def test_gradients_of_a_critic_that_moved_are_those_of_one_process(outcome):
    folder, layout, name = outcome
    alone, together = read(folder, "alone", name)[1], read(folder, layout, name)[1]
    grads = [key for key in alone if key.startswith("critic_grad/")]
    overall = max(np.abs(alone[key]).max() for key in grads)
    assert {"critic_grad/value_head.weight", "critic_grad/model.embed_tokens.weight"} <= set(grads)
    for key in grads:
        largest = np.abs(alone[key]).max()
        assert np.abs(together[key] - alone[key]).max() <= TOLERANCE * largest + 1e-6 * overall, key
