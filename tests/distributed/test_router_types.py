"""A bfloat16 learner with float32 routers on two processes: what it exports, trains and saves, in layouts that cut the
experts, the layers, the rows and the optimizer's state.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import case
from mixed_types import is_router, save_mixed
from ranks import run_worker
from safetensors.torch import load_file

from moerl.shards import Shard, ShardReader

WORKER = Path(__file__).with_name("checkpoint_worker.py")
LIMIT_SECONDS = 300
LR = 2e-4
KIND = "wide_sigmoid"
"""MiniMax-M2, which is published so."""
DISTRIBUTED = {"optim": {"distributed": True}}
OVERLAPPED = {"expert": 2, "overlap_grad_reduce": True}
CUTS = {"tp2_ep2": {"tensor": 2, "expert": 2}, "pp2": {"pipeline": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("router_types")
    save_mixed(folder / "model", KIND)
    run = {**case(str(folder / "model"), "gspo", "R3", "adam", KIND), "lr": LR, "precision": {"params": "bf16"}}
    train = {"before": 1, "after": 1}
    two = [
        {"sizes": CUTS["tp2_ep2"], "runs": [{**run, "run": "of_tp2_ep2"}]},
        {
            "sizes": OVERLAPPED,
            "runs": [
                {**run, **DISTRIBUTED, "run": "first", "save": "from_first", **train},
                {**run, **DISTRIBUTED, "run": "again", "load": "from_first", "after": 1},
            ],
        },
        {
            "sizes": CUTS["pp2"],
            "runs": [
                {**run, "run": "of_pp2"},
                {**run, "run": "moved", "load": "from_first", "save": "from_pp2", "after": 1},
            ],
        },
    ]
    run_worker(WORKER, two, folder, 2, limit_seconds=LIMIT_SECONDS)
    one = [{"sizes": {}, "runs": [{**run, "run": "alone", "load": "from_pp2", "save": "from_alone", "after": 1}]}]
    run_worker(WORKER, one, folder, 1, limit_seconds=LIMIT_SECONDS)
    return folder


def weights(folder: Path, run: str) -> dict[str, np.ndarray]:
    """What every rank exported, as float32."""
    with np.load(folder / f"{run}.npz") as arrays:
        return dict(arrays)


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    found = {}
    with ShardReader(folder) as reader:
        for name, entry in reader.entries.items():
            target = Shard(name, entry.shape, (0,) * len(entry.shape), torch.empty(entry.shape, dtype=entry.dtype))
            reader.fill(target)
            found[name] = target.data
    return found


@pytest.mark.parametrize("run", ["of_tp2_ep2", "of_pp2"])
def test_what_was_not_trained_comes_out_as_it_was_stored(folder, run):
    stored, found = load_file(folder / "model" / "model.safetensors"), weights(folder, run)
    assert stored.keys() == found.keys()
    for name, tensor in stored.items():
        assert np.array_equal(found[name], tensor.float().numpy()), name
        if is_router(name):
            assert not np.array_equal(found[name], tensor.bfloat16().float().numpy()), name


def test_the_same_layout_goes_on_to_the_bit(folder):
    records = [json.loads((folder / f"{run}.json").read_text())["after"] for run in ("first", "again")]
    assert records[0] == records[1]
    first, again = weights(folder, "first"), weights(folder, "again")
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_a_checkpoint_holds_them_in_float32_through_other_layouts_and_back(folder):
    """Weights, moments, and the float32 main weights of all that is not a router, distributed over ranks and not."""
    first = whole(folder / "from_first")
    routers = {name for name in first if name.startswith("weights/") and ".router." in name}
    assert {first[name].dtype for name in routers} == {torch.float32}
    assert all(not torch.equal(first[name], first[name].bfloat16().float()) for name in routers)
    others = {name for name in first if name.startswith("weights/")} - routers
    assert {first[name].dtype for name in others} == {torch.bfloat16}
    mains = {name.removeprefix("optimizer/main_param/") for name in first if name.startswith("optimizer/main_param/")}
    assert mains == {name.removeprefix("weights/") for name in others}
    for name in mains:
        assert torch.equal(first[f"optimizer/main_param/{name}"].bfloat16(), first[f"weights/{name}"]), name
    for moved in ("from_pp2", "from_alone"):
        second = whole(folder / moved)
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("run", ["moved", "alone"])
def test_another_layout_goes_on_as_the_first_would_have(folder, run):
    """Sums of bfloat16 products differ by layout, and with them the direction of what Adam moves least."""
    first, other = weights(folder, "first"), weights(folder, run)
    for name in filter(is_router, first):
        gap = np.abs(other[name] - first[name])
        assert gap.max() <= 4 * LR, name  # two updates
        assert gap.mean() < LR / 4, name
