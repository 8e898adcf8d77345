"""Every kind of model in a layout of two and in one of four processes on gloo, held to one process, in float32.

What one process computes is held to transformers in `tests/unit/mcore/test_mcore_families.py`; all layouts, methods and
routings are crossed in `test_layouts.py`, with fewer kinds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from layout_cases import SGD, case
from ranks import run_worker
from tiny_models import KINDS

WORKER = Path(__file__).with_name("learner_worker.py")
LAYOUTS: dict[int, dict[str, int]] = {1: {}, 2: {"tensor": 2}, 4: {"tensor": 2, "pipeline": 2}}
"""Processes -> sizes; where there are experts, the tensor ranks also share them out."""
TOLERANCE = 2e-5
"""Of `1 + |value|`; of a tensor's largest entry for gradients; absolute for weights."""


def name_of(kind: str) -> str:
    """Of its case."""
    return str(told(kind, "")["name"])


def told(kind: str, folder: str) -> dict[str, Any]:
    """What the worker is told of a kind: one step, of two updates."""
    return {**case(folder, "grpo", "R3" if KINDS[kind].layers else "none", SGD, kind), "steps": 1}


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
        run_worker(WORKER, {"layouts": layouts}, folder, world_size, limit_seconds=300)
    return folder


def read(folder: Path, world_size: int, kind: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    at = f"{world_size}.{name_of(kind)}"
    with np.load(folder / f"{at}.npz") as arrays:
        return json.loads((folder / f"{at}.json").read_text())["metrics"], dict(arrays)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_weights_and_metrics_are_those_of_one_process(outcomes, world_size, kind):
    metrics, alone = read(outcomes, 1, kind)
    others, together = read(outcomes, world_size, kind)
    assert alone.keys() == together.keys()
    grads = [key for key in alone if key.startswith("grad/")]
    assert len(grads) > 30
    for key, value in alone.items():
        allowed = TOLERANCE * np.abs(value).max() + 1e-9 if key.startswith("grad/") else TOLERANCE
        assert np.abs(together[key] - value).max() <= allowed, key
    for step, (a, b) in enumerate(zip(metrics, others, strict=True)):
        assert a.keys() == b.keys()
        assert {"loss", "optim/grad_norm"} <= a.keys()
        assert ("route_update/dev_p90" in a) is (KINDS[kind].layers > 0)
        for name in {"loss", "optim/grad_norm", "route/replay_coverage", "route_update/dev_p90"} & a.keys():
            assert abs(a[name] - b[name]) <= TOLERANCE * (1 + abs(a[name])), (step, name)


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
