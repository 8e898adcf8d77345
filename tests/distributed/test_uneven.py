"""Pipelines whose stages hold unequally many layers: two processes on gloo against one, in float32, and checkpoints
that move between such layouts.

`tests/unit/mcore/test_mcore_stages.py` holds the arithmetic to megatron's for every small cut.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_cases import OF_A_LAYOUT, WIDE, case
from ranks import run_worker
from tiny_models import KINDS, save_model

LEARNER, CHECKPOINTS = (Path(__file__).with_name(name) for name in ("learner_worker.py", "checkpoint_worker.py"))
LIMIT_SECONDS = 300
TOLERANCE = 2e-5
"""Of `1 + |value|` for metrics; of a tensor's largest entry for gradients."""
FIRST_2 = {"pipeline": 2, "first_stage_layers": 2}
FIRST_1 = {"pipeline": 2, "last_stage_layers": 2}
CHUNKS = {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 4, "last_stage_layers": 2}
"""Megatron divides by the number of stages in the middle, of which there are none."""
MODELS = {"first_2": ("dense_first", 3), "first_1": ("dense_first", 3), "chunks": ("dense_first", 6)}
"""Layout -> kind of model and its layers; the first of them is dense."""
SIZES = {"first_2": FIRST_2, "first_1": FIRST_1, "chunks": CHUNKS}
METHODS = (("rspo", "R3"), ("ppo", "none"))
"""RSPO has a factor of every layer's router; PPO a critic that is cut likewise."""


def told(folder: Path, layers: int, method: str, routing: str) -> dict[str, Any]:
    """What a worker is told of a case."""
    made = case(str(folder), method, routing, "adam")
    shape = {**made["shape"], "layers": layers - 1}
    return {**made, "name": f"{layers}.{method}", "shape": shape}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    assert KINDS["dense_first"].sizes["mlp_only_layers"] == [0]
    cases: dict[int, list[dict[str, Any]]] = {}
    for kind, layers in set(MODELS.values()):
        model = save_model(folder / f"model_{layers}", kind, num_hidden_layers=layers)
        cases[layers] = [told(model, layers, *method) for method in METHODS]
    alone = [{"name": "alone", "sizes": {}, "cases": [one for some in cases.values() for one in some]}]
    cut = [{"name": name, "sizes": SIZES[name], "cases": cases[layers]} for name, (_, layers) in MODELS.items()]
    run_worker(LEARNER, {"layouts": alone}, folder, 1, limit_seconds=LIMIT_SECONDS)
    run_worker(LEARNER, {"layouts": cut}, folder, 2, limit_seconds=LIMIT_SECONDS)
    run = told(folder / "model_3", 3, "gspo", "R3")
    train = {"before": 2, "after": 2}
    two = [
        {"sizes": FIRST_2, "runs": [{**run, "run": "first_2", "save": "from_first_2", **train}]},
        {"sizes": FIRST_1, "runs": [{**run, "run": "first_1", "load": "from_first_2", "save": "moved", "after": 2}]},
        {"sizes": FIRST_2, "runs": [{**run, "run": "again", "load": "from_first_2", "after": 2}]},
    ]
    run_worker(CHECKPOINTS, two, folder, 2, limit_seconds=LIMIT_SECONDS)
    one = [{"sizes": {}, "runs": [{**run, "run": "alone", "load": "moved", "after": 2}]}]
    run_worker(CHECKPOINTS, one, folder, 1, limit_seconds=LIMIT_SECONDS)
    return folder


def assert_near(one: dict[str, float], other: dict[str, float]) -> None:
    assert one.keys() == other.keys()
    for name in one.keys() - OF_A_LAYOUT:
        allowed = WIDE.get(name, TOLERANCE) * (1 + abs(one[name]))
        assert abs(other[name] - one[name]) <= allowed, (name, one[name], other[name])


@pytest.mark.parametrize("method", [method for method, _ in METHODS])
@pytest.mark.parametrize("layout", MODELS)
def test_loss_gradients_routes_and_metrics_are_those_of_one_process(folder, layout, method):
    name = f"{MODELS[layout][1]}.{method}"
    alone, cut = (json.loads((folder / f"{where}.{name}.json").read_text())["metrics"] for where in ("alone", layout))
    assert len(alone) == len(cut) == 3
    for one, other in zip(alone, cut, strict=True):
        assert {"loss", "optim/grad_norm", "route_update/dev_p90"} <= one.keys()
        assert_near(one, other)
    with np.load(folder / f"alone.{name}.npz") as one, np.load(folder / f"{layout}.{name}.npz") as other:
        assert set(one.files) == set(other.files)
        grads = [key for key in one.files if key.startswith("grad/")]
        assert len(grads) > 40
        for key in grads:
            gap = np.abs(other[key] - one[key]).max()
            assert gap <= TOLERANCE * np.abs(one[key]).max() + 1e-9, key
    with (
        np.load(folder / f"alone.{name}.routes.0.npz") as one,
        np.load(folder / f"{layout}.{name}.routes.0.npz") as cut,
    ):
        assert set(one.files) == set(cut.files)
        assert len(one.files) == 12
        for sample in one.files:
            assert one[sample].shape[1] == MODELS[layout][1] - 1
            assert np.array_equal(one[sample], cut[sample]), sample


def test_checkpoints_move_between_uneven_cuts(folder):
    def after(run: str) -> list[dict[str, float]]:
        return json.loads((folder / f"{run}.json").read_text())["after"]

    wanted = after("first_2")
    assert after("again") == wanted
    for run in ("first_1", "alone"):
        for one, other in zip(wanted, after(run), strict=True):
            assert_near(one, other)


def test_a_checkpoint_tells_how_it_was_cut_and_its_files_hold_those_layers(folder):
    cuts = {"from_first_2": ("first_stage_layers", [{0, 1}, {2}]), "moved": ("last_stage_layers", [{0}, {1, 2}])}
    for name, (field, stages) in cuts.items():
        for rank, layers in enumerate(stages):
            told = json.loads((folder / name / f"rank_{rank:05d}.json").read_text())
            assert told["layout"][field] == 2
            held = set(re.findall(r"weights/decoder\.layers\.(\d+)\.", json.dumps(told)))
            assert {int(layer) for layer in held} == layers
