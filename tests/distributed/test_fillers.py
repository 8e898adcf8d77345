"""Steps with fewer samples than data ranks: trained as one data rank trains them, in every layout that cuts data.

Three samples make two minibatches, of two samples and of one; a single sample makes one. Ranks without a sample run
fillers. All is held to one process in float32, as `test_layouts.py` holds full steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_models
from layout_cases import AUX, LAYOUTS, OF_A_LAYOUT, SGD, WIDE, case
from ranks import run_worker

WORKER = Path(__file__).with_name("learner_worker.py")
LIMIT_SECONDS = 900
TOLERANCE = 2e-5
"""Of `1 + |value|`; of a tensor's largest entry for gradients; absolute for weights."""

SIZES: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "dp2": {},
    "ep2": {"expert": 2},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2_dp2_overlap": {"context": 2, "context_cut": "whole", "overlap_grad_reduce": True},
    "pp2_ep2_dp2_overlap": {"pipeline": 2, "expert": 2, "overlap_grad_reduce": True},
}


class Run(NamedTuple):
    """A case in a layout."""

    layout: str
    method: str
    routing: str
    router: str
    optimizer: str = "adam"


THREE = (
    Run("dp4", "grpo", "R3", "softmax"),
    Run("dp4", "rspo", "R2", "sigmoid"),
    Run("dp4", "ppo", "none", "dense_first", SGD),
    Run("dp4", "dapo", "R3", "shared"),
    Run("ep4", "rspo", "R3", "latent"),
    Run("tp2_ep2_dp2", "gspo", "R2", "sigmoid", SGD),
    Run("pp2_ep2_dp2", "rspo", "R3", "softmax"),
    Run("pp2_vpp2_dp2", "rspo", "R2", "sigmoid"),
    Run("pp2_vpp2_dp2", "ppo", "none", "dense_first", SGD),
    Run("cp2_dp2", "grpo", "R3", "softmax"),
    Run("cp2_dp2", "ppo", "none", "dense_first", SGD),
    Run("cp2_dp2_overlap", "grpo", "R3", "softmax"),
    Run("pp2_ep2_dp2_overlap", "grpo", "R3", "softmax"),
)
ONE = (
    Run("dp2", "grpo", "R3", "softmax"),
    Run("dp2", "ppo", "R2", "sigmoid", SGD),
    Run("dp2", "rspo", "R2", "sigmoid"),
    Run("vpp2", "ppo", "none", "dense_first", SGD),
)
EPOCHS = (
    Run("dp2", "rspo", "R2", "softmax"),
    Run("ep2", "ppo", "R3", "softmax", SGD),
)
"""Two epochs of a full step: samples stay on their ranks, and ranks with fewer in a minibatch run fillers."""
BALANCED = Run("dp4", "grpo", "none", "softmax", AUX)
"""The balancing loss is a mean over micro-batches, fillers included, so only its being a number is held."""
LENGTHS = {4: (17, 21, 29), 2: (21,)}
"""Of the samples of a step, by number of processes."""


def told(run: Run, model: str, processes: int) -> dict[str, Any]:
    """What the worker is told."""
    made = case(model, run.method, run.routing, run.optimizer, run.router)
    if run in EPOCHS:
        return {**made, "name": f"{made['name']}.epochs", "epochs": 2, "steps": 2}
    lengths = LENGTHS[processes]
    return {**made, "name": f"{made['name']}.{len(lengths)}", "lengths": lengths, "steps": 2}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple[int, Run], tuple[Any, Any]]:
    """(processes, run) -> what one process and the layout made of it."""
    folder = tmp_path_factory.mktemp("fillers")
    models = {run.router: "" for run in (*THREE, *ONE, *EPOCHS, BALANCED)}
    models = {router: str(tiny_models.save_model(folder / router, router)) for router in models}
    wanted = {4: (*THREE, BALANCED), 2: (*ONE, *EPOCHS)}
    cases = {(n, run): told(run, models[run.router], n) for n, runs in wanted.items() for run in runs}
    alone = list({one["name"]: one for one in cases.values()}.values())
    run_worker(WORKER, {"layouts": [{"name": "alone", "sizes": {}, "cases": alone}]}, folder, 1, limit_seconds=900)
    for n, runs in wanted.items():
        layouts = [
            {"name": name, "sizes": SIZES[name], "cases": [cases[n, run] for run in runs if run.layout == name]}
            for name in dict.fromkeys(run.layout for run in runs)
        ]
        run_worker(WORKER, {"layouts": layouts}, folder, n, limit_seconds=LIMIT_SECONDS)
    return {
        key: (read(folder, "alone", one["name"]), read(folder, key[1].layout, one["name"]))
        for key, one in cases.items()
    }


def read(folder: Path, layout: str, name: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    record = json.loads((folder / f"{layout}.{name}.json").read_text())
    with np.load(folder / f"{layout}.{name}.npz") as arrays:
        return record["metrics"], dict(arrays)


def of_every_run(*optimizers):
    found = [(n, run) for n, runs in ((4, THREE), (2, (*ONE, *EPOCHS))) for run in runs if run.optimizer in optimizers]
    return pytest.mark.parametrize("key", found, ids=["-".join(map(str, (n, *run))) for n, run in found])


@of_every_run("adam", SGD)
def test_metrics_are_those_of_one_process(outcomes, key):
    (alone, _), (together, _) = outcomes[key]
    assert len(alone) == 2
    for step, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert a.keys() == b.keys()
        assert {"loss", "optim/grad_norm", "mm/k1", "pg/entropy"} <= a.keys()
        assert key[0] == 2 or "route_update/dev_p90" in a, "two minibatches: an update lies between old and current"
        for metric in a.keys() - OF_A_LAYOUT:
            allowed = WIDE.get(metric, TOLERANCE) * (1 + abs(a[metric]))
            assert abs(b[metric] - a[metric]) <= allowed, (step, metric, a[metric], b[metric])
        assert b["data/padding_fraction"] > a["data/padding_fraction"] == 0, "fillers are padding, and told as such"


@of_every_run("adam", SGD)
def test_gradients_are_those_of_one_process(outcomes, key):
    (_, alone), (_, together) = outcomes[key]
    assert alone.keys() == together.keys()
    names = [name for name in alone if name.startswith("grad/")]
    assert len(names) > 60
    for name in names:
        largest = np.abs(alone[name]).max()
        assert np.abs(together[name] - alone[name]).max() <= TOLERANCE * largest + 1e-9, name
    critics = [name for name in alone if name.startswith("critic_grad/")]
    overall = max((np.abs(alone[name]).max() for name in critics), default=0.0)
    assert bool(critics) == (key[1].method == "ppo")
    for name in critics:
        largest = np.abs(alone[name]).max()
        assert np.abs(together[name] - alone[name]).max() <= TOLERANCE * largest + 1e-6 * overall, name


@of_every_run(SGD)
def test_weights_after_two_steps_are_those_of_one_process(outcomes, key):
    """Of plain SGD: Adam divides by the size of a gradient, so that rounding of tiny ones is not tiny."""
    (_, alone), (_, together) = outcomes[key]
    names = [name for name in alone if name.startswith("weight/")]
    assert len(names) > 60
    for name in names:
        assert np.abs(together[name] - alone[name]).max() <= TOLERANCE, name


def test_the_balancing_loss_of_fillers_is_a_number(outcomes):
    (alone, _), (together, arrays) = outcomes[4, BALANCED]
    assert [step["optim/updates"] for step in together] == [step["optim/updates"] for step in alone]
    assert all(np.isfinite(values).all() for values in arrays.values())
