"""The whole loop in several processes is that of one, and goes on from its checkpoints bit for bit.

All layouts run in one launch of four processes (`loop_worker.py`).
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from layout_cases import OF_A_LAYOUT, WIDE
from safetensors.torch import load_file

from moerl.convert.compare import compare_weights
from moerl.convert.places import find

sys.path.insert(0, str(Path(__file__).parent))
from loop_files import LIMIT_SECONDS, METHODS, ONWARD, Bench, finish, legal_layouts, start

SLOW_LIMIT_SECONDS = 3600
TOLERANCE = 2e-5
"""Of `1 + |value|`."""

LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dp4": ("gspo", ()),
    "dp4_few": ("few", ()),
    "pp2_few": ("few", ("parallel.pipeline=2",)),
    "tp2_ep2": ("grpo", ("parallel.tensor=2", "parallel.expert=2")),
    "tp4": ("gspo", ("parallel.tensor=4",)),
    "pp2": ("rspo", ("parallel.pipeline=2",)),
    "tp2_pp2": ("ppo", ("parallel.tensor=2", "parallel.pipeline=2")),
    "pp2_vpp2": ("gspo", ("parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "ep2": ("ppo", ("parallel.expert=2",)),
    "cp2_pp2": ("rspo", ("parallel.context=2", "parallel.pipeline=2")),
    "cp2_etp2_ep2": ("gspo", ("parallel.context=2", "parallel.expert=2", "parallel.expert_tensor=2")),
}
"""Name -> method and overrides; one line for each layout of four processes."""


def every_layout() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every layout of four processes that is legal, the methods in turn.

    Without `few`, which is about data ranks, and `grpo`: its KL is part of the reward, so the advantages of a group
    with equal answers are differences of logprobs in their last digits over their own spread, and layouts round those
    differently (2e-4 of the gradient).
    """
    found = {}
    methods = [method for method in METHODS if method not in ("grpo", "few")]
    for method, axes in zip(itertools.cycle(methods), legal_layouts(4), strict=False):
        name = "every." + ("_".join(f"{axis}{size}" for axis, size in axes.items()) or "data4")
        found[name] = (method, tuple(f"parallel.{axis}={size}" for axis, size in axes.items()))
    return found


EVERY = every_layout()


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("loop"))


WORKER = str(Path(__file__).with_name("loop_worker.py"))


def run_plan(bench: Bench, processes: int, cases: dict[str, tuple[str, tuple[str, ...]]], file: str) -> None:
    process = start(processes, WORKER, bench.plan(cases, file))
    output = finish(process, SLOW_LIMIT_SECONDS if cases is EVERY else LIMIT_SECONDS)
    assert process.returncode == 0, output[-4000:]


@pytest.fixture(scope="module")
def alone(bench) -> Bench:
    run_plan(bench, 1, {f"alone.{method}": (method, ()) for method in METHODS}, "alone.json")
    return bench


@pytest.fixture(scope="module")
def layouts(alone) -> Bench:
    run_plan(alone, 4, LAYOUTS, "four.json")
    return alone


@pytest.fixture(scope="module")
def every(alone) -> Bench:
    run_plan(alone, 4, EVERY, "every.json")
    return alone


@pytest.fixture
def done(request, name: str) -> Bench:
    """Where the run of that layout is; the whole set runs when the first of it is asked for."""
    return request.getfixturevalue("every" if name in EVERY else "layouts")


NAMES = [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in EVERY)]


def assert_near(one: dict[str, float], other: dict[str, float]) -> None:
    assert one.keys() == other.keys()
    for metric in one.keys() - OF_A_LAYOUT:
        value = one[metric]
        allowed = WIDE.get(metric, TOLERANCE) * (1 + abs(value))
        assert abs(other[metric] - value) <= allowed, (metric, value, other[metric])


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_that_of_one_process(done, name):
    method = {**LAYOUTS, **EVERY}[name][0]
    alone, together = done.rows(f"alone.{method}.parts")[:2], done.rows(name)[:1]
    together += done.rows(f"{name}.parts")[1:2]
    for a, b in zip(alone, together, strict=True):
        assert_near(a, b)
    first = [(done.runs / one / "samples.jsonl").read_text().splitlines()[:4] for one in (name, f"{name}.parts")]
    assert first[0] == first[1]
    assert len(alone[1]) > 150


def test_answers_without_a_verdict_leave_ranks_without_a_sample(layouts):
    """What the runs called few are for."""
    errors = [row["rollout/errors"] for row in layouts.rows("dp4_few")[1:]]
    assert len(errors) == 2
    assert {1.0, 2.0, 3.0}.issuperset(errors), "of four answers to four data ranks"


@pytest.mark.parametrize("name", [name for name, (method, _) in LAYOUTS.items() if method == "gspo"])
def test_weights_after_the_first_step_are_those_of_one_process(layouts, name):
    """With plain SGD: Adam turns a gradient of rounding size into a whole step."""
    alone = load_file(layouts.runs / "alone.gspo.after_1" / "model.safetensors")
    together = load_file(layouts.runs / f"{name}.after_1" / "model.safetensors")
    assert alone.keys() == together.keys()
    assert max(float((together[key] - alone[key]).abs().max()) for key in alone) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_one_step_and_one_are_two_steps_to_the_bit(done, name):
    assert done.rows(f"{name}.parts")[2:] == done.rows(name)[2:]
    assert [row["step"] for row in done.rows(name)] == [0, 1, 2]
    for file in ("hf/model.safetensors", "exports/step_000002/model.safetensors", "samples.jsonl", "load.jsonl"):
        assert (done.runs / name / file).read_bytes() == (done.runs / f"{name}.parts" / file).read_bytes(), file


@pytest.mark.parametrize("name", ONWARD)
def test_a_run_goes_on_in_another_layout_as_in_its_own(layouts, name):
    """From its first checkpoint; all that is measured, of the evaluation at the end too."""
    straight, moved = (layouts.rows(f"{name}.{run}") for run in ("parts", "moved"))
    assert [row["step"] for row in moved] == [0, 1, 2]
    assert moved[:2] == straight[:2]
    assert_near(straight[2], moved[2])
    assert "eval/accuracy_greedy" in moved[2]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_a_layout_hold_the_weights_that_its_ranks_export(done, name):
    """Converted without a process group; the layout of the run does not matter."""
    run = done.runs / name
    assert not compare_weights(find(run), find(run / "hf")).differences
    second = find(run / "checkpoints" / "step_000002"), find(run / "exports" / "step_000002")
    assert not compare_weights(*second).differences
