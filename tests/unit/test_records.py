"""What a run writes down: a record whose evaluation failed is completed when the run goes on."""

from __future__ import annotations

import json
import math

import pytest

from moerl.array_state import join_arrays, split_arrays
from moerl.metrics import Last, Mean
from moerl.records import Records, RecordSettings
from moerl.telemetry.progress import Progress
from moerl.telemetry.sinks import NON_FINITE, JsonlSink, Nowhere
from moerl.telemetry.timers import Timers


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def start(tmp_path, clock):
    """A process of the run, which goes on behind `resume_step`."""

    def records(resume_step=0):
        return Records(
            settings=RecordSettings(tmp_path, 1, dump_batches=False, num_experts=0),
            sinks=JsonlSink(tmp_path, resume_step=resume_step),
            loads=Nowhere(),
            pass_rates=Nowhere(),
            progress=Progress(3, 1, "off"),
            timers=Timers(clock),
            dump_batch=lambda *_: None,
        )

    return records


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def spend(records, clock, phase, seconds):
    with records.phase(phase):
        clock.now += seconds


def saved(records):
    """Its state as a checkpoint holds it."""
    return join_arrays(*split_arrays(records.state_dict()))


def test_a_record_that_lacks_its_evaluation_is_completed_by_the_run_that_goes_on(tmp_path, start, clock):
    first = start()
    with first:
        first.step(1, {"a": Last(0.1)})
        assert not first.lacks_evaluation
        first.extra({"contract/holds": 1.0})
        spend(first, clock, "update", 3.0)
        spend(first, clock, "evaluate", 7.0)
        first.step(2, {"a": Last(1 / 3), "bad": Last(math.nan)}, lacks_evaluation=True)
        state = saved(first)
    left = {"a": 1 / 3, "bad": None, NON_FINITE: 1, "contract/holds": 1.0, "perf/update_seconds": 3.0}
    left |= {"step": 2, "perf/evaluate_seconds": 7.0, "perf/step_seconds": 10.0}
    assert rows(tmp_path)[1:] == [left]
    for _ in range(2):  # the second time as after a kill before the next checkpoint
        again = start(resume_step=3)
        with again:
            again.load_state_dict(state)
            assert again.lacks_evaluation
            spend(again, clock, "evaluate", 2.0)
            again.evaluated(2, {"eval/accuracy_greedy": Mean(1.0, 4.0)})
            assert not again.lacks_evaluation
            assert saved(again)["unevaluated"] is None
            spend(again, clock, "update", 5.0)
            again.step(3, {"a": Last(0.5)})
        whole = left | {"eval/accuracy_greedy": 0.25, "perf/evaluate_seconds": 2.0}
        later = {"step": 3, "a": 0.5, "perf/update_seconds": 5.0, "perf/step_seconds": 5.0}
        assert rows(tmp_path)[1:] == [whole, later], "its times are not those of the next step"


def test_a_run_whose_evaluation_fails_once_more_still_lacks_it(tmp_path, start):
    first = start()
    with first:
        first.step(1, {"a": Last(0.1)}, lacks_evaluation=True)
        before, state = rows(tmp_path), saved(first)
    with start(resume_step=2) as again:
        again.load_state_dict(state)
    assert rows(tmp_path) == before
    assert saved(again)["unevaluated"] == state["unevaluated"]
