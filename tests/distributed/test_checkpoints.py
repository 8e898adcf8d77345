"""A learner goes on from a checkpoint in its own layout to the bit, and in any other as if nothing had changed.

Four processes on gloo and one; with the plain optimizer and with the one that is distributed over data-parallel ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_cases import OF_A_LAYOUT, WIDE, case
from ranks import run_worker
from tiny_models import save_model

from moerl.checkpoint import CheckpointStore
from moerl.shards import Shard, ShardReader

WORKER = Path(__file__).with_name("checkpoint_worker.py")
LIMIT_SECONDS = 420
TOLERANCE = 2e-5
"""Of `1 + |value|` for metrics; of a tensor's largest entry for gradients; absolute for weights."""


DISTRIBUTED = {"optim": {"distributed": True}}
BF16 = {"precision": {"params": "bf16"}}
DROPOUT = {"model_options": {"hidden_dropout": 0.1}}
TP2_EP2 = {"tensor": 2, "expert": 2}
PP2 = {"pipeline": 2}
PP2_VPP2 = {"pipeline": 2, "virtual_pipeline": 2}
EP4 = {"expert": 4}
CP2_EP2 = {"context": 2, "expert": 2}
ETP2_EP2 = {"expert": 2, "expert_tensor": 2}
CP2_TP2 = {"context": 2, "tensor": 2}


def one_process():
    """Trains and saves alone."""
    return [{"sizes": {}, "runs": [{"run": "alone", "before": 3, "gradients": True, "save": "from_alone", "after": 2}]}]


def four_processes():
    """Everything that four processes do, by layout."""
    train, short = {"before": 3, "after": 2}, {"before": 1, "after": 1}
    first = [
        {"run": "plain", "gradients": True, "save": "from_plain", **train},
        {"run": "plain_again", "load": "from_plain", "after": 2},
        {"run": "distributed", "gradients": True, "save": "from_distributed", **train, **DISTRIBUTED},
        {"run": "distributed_again", "load": "from_distributed", "after": 2, **DISTRIBUTED},
        {"run": "swapped", "load": "from_plain", "save": "swapped", "after": 2, **DISTRIBUTED},
        {"run": "from_one", "load": "from_alone", "save": "spread", "after": 2, **DISTRIBUTED},
        {"run": "noisy", "save": "from_noisy", **short, **DROPOUT, **DISTRIBUTED},
        {"run": "noisy_again", "load": "from_noisy", "after": 1, **DROPOUT, **DISTRIBUTED},
        {"run": "bf16", "save": "from_bf16", **short, **BF16, **DISTRIBUTED},
        {"run": "bf16_again", "load": "from_bf16", "after": 1, **BF16, **DISTRIBUTED},
        {"run": "critic", "critic": True, "save": "critic"},
    ]
    return [
        {"sizes": TP2_EP2, "runs": first},
        {
            "sizes": PP2,
            "runs": [
                {"run": "plain_in_pp2", "load": "from_plain", "save": "in_pp2", "after": 2},
                {
                    "run": "sharded_in_pp2",
                    "load": "from_distributed",
                    "save": "in_pp2_d",
                    "after": 2,
                    **DISTRIBUTED,
                },
                {"run": "critic_in_pp2", "critic": True, "load": "critic", "save": "critic_in_pp2"},
                {"run": "bf16_in_pp2", "load": "from_bf16", "save": "bf16_in_pp2", **BF16},
            ],
        },
        {"sizes": PP2_VPP2, "runs": [{"run": "in_vpp2", "load": "in_pp2_d", "save": "in_vpp2", "after": 2}]},
        {
            "sizes": CP2_EP2,
            "runs": [{"run": "in_cp2", "load": "from_plain", "save": "in_cp2", "after": 2, **DISTRIBUTED}],
        },
        {"sizes": EP4, "runs": [{"run": "in_ep4", "load": "in_pp2", "save": "in_ep4", "after": 2, **DISTRIBUTED}]},
        {"sizes": ETP2_EP2, "runs": [{"run": "in_etp2", "load": "from_plain", "save": "from_etp2", **short}]},
        {
            "sizes": CP2_TP2,
            "runs": [
                {"run": "etp2_in_cp2_tp2", "load": "from_etp2", "after": 1},
                {"run": "in_cp2_tp2", "load": "from_plain", "save": "from_cp2_tp2", **short, **DISTRIBUTED},
            ],
        },
        {"sizes": TP2_EP2, "runs": [{"run": "killed", "load": "from_plain", "killed": "store", **DISTRIBUTED}]},
    ]


def alone_again():
    """One process goes on from what four saved."""
    runs = [
        {"run": "plain_alone", "load": "from_plain", "save": "back_alone", "after": 2},
        {"run": "distributed_alone", "load": "in_ep4", "after": 2},
        {"run": "cp2_tp2_alone", "load": "from_cp2_tp2", "after": 1},
        {"run": "after_the_kill", "load": "store/step_000003/learner", "after": 2},
        {"run": "bf16_alone", "load": "bf16_in_pp2", "save": "bf16_back_alone", **BF16},
    ]
    return [{"sizes": {}, "runs": runs}]


def four_again():
    """As many go on from what the killed ones saved, in their layout."""
    run = {"run": "killed_again", "load": "store/step_000003/learner", "after": 2, **DISTRIBUTED}
    return [{"sizes": TP2_EP2, "runs": [run]}]


def start(plan: list[dict], folder: Path, processes: int, *, is_killed: bool = False) -> str:
    model = str(folder / "model")
    for layout in plan:
        layout["runs"] = [{**case(model, "gspo", "R3", "adam"), **run} for run in layout["runs"]]
    return run_worker(WORKER, plan, folder, processes, limit_seconds=LIMIT_SECONDS, is_killed=is_killed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_model(folder / "model", "dense_first")
    start(one_process(), folder, 1)
    (folder / "four.log").write_text(start(four_processes(), folder, 4, is_killed=True))
    (folder / "alone.log").write_text(start(alone_again(), folder, 1))
    start(four_again(), folder, 4)
    return folder


def record(folder: Path, run: str) -> dict[str, Any]:
    return json.loads((folder / f"{run}.json").read_text())


def weights(folder: Path, run: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{run}.npz") as arrays:
        return dict(arrays)


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint."""
    found = {}
    with ShardReader(folder) as reader:
        for name, entry in reader.entries.items():
            target = Shard(name, entry.shape, (0,) * len(entry.shape), torch.empty(entry.shape, dtype=entry.dtype))
            reader.check([target])
            reader.fill(target)
            found[name] = target.data
    return found


def assert_near(a: list[dict[str, float]], b: list[dict[str, float]], steps: int = 2) -> None:
    assert len(a) == len(b) == steps
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - OF_A_LAYOUT:
            value = one[name]
            allowed = WIDE.get(name, TOLERANCE) * (1 + abs(value))
            assert abs(other[name] - value) <= allowed, (name, value, other[name])


@pytest.mark.parametrize("run", ["plain", "distributed", "noisy", "bf16"])
def test_the_same_layout_goes_on_to_the_bit(folder, run):
    """`noisy` has dropout, so that every rank's random numbers count; `bf16` has float32 main weights beside."""
    assert record(folder, run)["after"] == record(folder, f"{run}_again")["after"]
    before, after = weights(folder, run), weights(folder, f"{run}_again")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_what_was_saved_before_a_kill_goes_on_to_the_bit(folder):
    """As one that saved at that step, went on, and that nobody killed."""
    assert record(folder, "killed_again")["after"] == record(folder, "swapped")["after"]
    straight, resumed = weights(folder, "swapped"), weights(folder, "killed_again")
    assert straight.keys() == resumed.keys()
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


CONTINUATIONS = {
    "swapped": "plain",
    "plain_in_pp2": "plain",
    "sharded_in_pp2": "distributed",
    "in_vpp2": "distributed",
    "in_cp2": "plain",
    "in_ep4": "plain",
    "plain_alone": "plain",
    "distributed_alone": "plain",
    "from_one": "alone",
    "after_the_kill": "plain",
}


@pytest.mark.parametrize("run", CONTINUATIONS)
def test_another_layout_goes_on_as_the_first_would_have(folder, run):
    assert_near(record(folder, CONTINUATIONS[run])["after"], record(folder, run)["after"])


@pytest.mark.parametrize(("run", "onward"), [("in_etp2", "etp2_in_cp2_tp2"), ("in_cp2_tp2", "cp2_tp2_alone")])
def test_what_split_experts_and_slices_of_tensor_ranks_saved_goes_on_elsewhere(folder, run, onward):
    """Trained for a step in that layout before it is saved."""
    wanted = record(folder, "plain")["after"]
    found = record(folder, run)
    assert_near(wanted, found["before"] + found["after"])
    assert_near(wanted[1:], record(folder, onward)["after"], 1)


RESHARDED = {
    "swapped": "from_plain",
    "in_pp2": "from_plain",
    "in_cp2": "from_plain",
    "in_ep4": "from_plain",
    "back_alone": "from_plain",
    "in_pp2_d": "from_distributed",
    "in_vpp2": "from_distributed",
    "spread": "from_alone",
    "bf16_in_pp2": "from_bf16",
    "bf16_back_alone": "from_bf16",
}


@pytest.mark.parametrize("name", RESHARDED)
def test_saved_again_elsewhere_every_tensor_is_the_same_to_the_bit(folder, name):
    """Weights, both moments, and the float32 main weights of bf16; through two other layouts and back."""
    first, second = whole(folder / RESHARDED[name]), whole(folder / name)
    assert first.keys() == second.keys()
    kinds = {key.rsplit("/", 1)[0] for key in first}
    expected = {"weights", "optimizer/exp_avg", "optimizer/exp_avg_sq"}
    assert kinds == expected | ({"optimizer/main_param"} if "bf16" in name else set())
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert float(first["optimizer/exp_avg_sq/decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].max()) > 0


def test_a_critic_and_its_head_move_to_another_layout(folder):
    first, second = whole(folder / "critic" / "critic"), whole(folder / "critic_in_pp2" / "critic")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert first["weights/value_head.weight"].flatten().tolist() == list(range(1, 41))


def test_the_distributed_optimizer_is_the_plain_one(folder):
    a, b = (record(folder, name)["before"] for name in ("plain", "distributed"))
    assert_near(a[1:], b[1:])
    plain, distributed = weights(folder, "plain"), weights(folder, "distributed")
    assert all(np.abs(plain[name] - distributed[name]).max() <= TOLERANCE for name in plain)
    for run in ("plain", "distributed"):
        with np.load(folder / f"{run}.grads.npz") as grads, np.load(folder / "alone.grads.npz") as alone:
            assert len(alone.files) > 80
            for name in alone.files:
                gap = np.abs(grads[name] - alone[name]).max()
                assert gap <= TOLERANCE * np.abs(alone[name]).max() + 1e-9, (run, name)


def test_the_distributed_optimizer_leaves_each_of_two_data_ranks_half_of_the_moments(folder):
    """The plain one has those of all of its parameters."""
    held = {run: record(folder, run)["moments"] for run in ("plain", "distributed", "bf16", "alone")}
    assert held["alone"] > 1.5 * held["plain"], "tensor and expert ranks"
    for run in ("distributed", "bf16"):
        assert 0.45 < held[run] / held["plain"] < 0.55, held


def test_data_parallel_ranks_share_the_writing(folder):
    for name in ("from_plain", "from_distributed"):
        sizes = [path.stat().st_size for path in sorted((folder / name).glob("*.safetensors"))]
        assert len(sizes) == 4
        assert max(sizes) < 1.7 * min(sizes), (name, sizes)
    whole_bytes = (folder / "from_alone" / "rank_00000.safetensors").stat().st_size
    assert sum(path.stat().st_size for path in (folder / "from_plain").glob("*.safetensors")) < 1.2 * whole_bytes


def test_another_layout_says_that_random_numbers_start_anew(folder):
    assert "'pp': 1" in (folder / "alone.log").read_text()
    log = (folder / "four.log").read_text()
    assert "was written under the layout" in log
    assert "start from seed" in log
    assert "from_distributed was written" in log
    assert "from_plain was written" in log


def test_a_kill_in_the_middle_of_a_save_in_the_background_leaves_the_one_before(folder):
    """It is whole, and it is what `after_the_kill` went on from; the job ended with the rank that died."""
    log = (folder / "four.log").read_text()
    assert "saved [3]" in log
    assert "Signal 9 (SIGKILL)" in log
    assert "(local_rank: 1)" in log
    assert (folder / "store" / ".partial-step_000004" / "learner" / "rank_00001.safetensors").is_file()
    store = CheckpointStore(folder / "store", keep=1, model_id="m")
    assert store.steps() == [3]
    found = store.latest(on_corrupt="refuse")
    assert found is not None
    assert found.loop_state() == {"step": 3}
    assert found.manifest["config_id"] == "c"
    assert len(found.manifest["files"]) == 9
    store.sweep()
    assert [path.name for path in (folder / "store").iterdir()] == ["step_000003"]
