from __future__ import annotations

import pytest

from moerl.metrics import merge_into, to_floats
from moerl.telemetry.timers import Timers


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_rates_divide_by_their_phases_and_collect_resets() -> None:
    clock = _Clock()
    timers = Timers(clock)
    for phase, seconds in (("rollout", 2.0), ("score", 0.5), ("update", 1.5), ("rollout", 2.0)):
        with timers(phase):
            clock.now += seconds
    clock.now += 1.0
    timers.count_tokens("rollout", 100, phases=("rollout",))
    timers.count_tokens("rollout", 300, phases=("rollout",))
    timers.count_tokens("learn", 500, phases=("score", "update"))
    assert to_floats(timers.collect()) == {
        "perf/rollout_seconds": 4.0,
        "perf/score_seconds": 0.5,
        "perf/update_seconds": 1.5,
        "perf/step_seconds": 7.0,
        "perf/rollout_tokens_per_second": 100.0,
        "perf/learn_tokens_per_second": 250.0,
    }
    clock.now += 3.0
    assert to_floats(timers.collect()) == {"perf/step_seconds": 3.0}


def test_a_phase_that_raises_is_still_timed() -> None:
    clock = _Clock()
    timers = Timers(clock)

    def fail_inside() -> None:
        with timers("rollout"):
            clock.now += 2.0
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert to_floats(timers.collect())["perf/rollout_seconds"] == 2.0


def test_ranks_merge_as_the_slowest_time_and_tokens_by_seconds() -> None:
    merged = {}
    for seconds, tokens in ((1.0, 100), (3.0, 100)):
        clock = _Clock()
        timers = Timers(clock)
        with timers("rollout"):
            clock.now += seconds
        timers.count_tokens("rollout", tokens, phases=("rollout",))
        merge_into(merged, timers.collect())
    assert to_floats(merged)["perf/rollout_seconds"] == 3.0
    assert to_floats(merged)["perf/rollout_tokens_per_second"] == 50.0


def test_a_rate_without_time_has_no_value() -> None:
    timers = Timers(_Clock())
    timers.count_tokens("rollout", 10, phases=("rollout",))
    assert "perf/rollout_tokens_per_second" not in to_floats(timers.collect())


def test_operations_by_seconds_of_their_phases_and_by_the_device() -> None:
    clock = _Clock()
    timers = Timers(clock, num_devices=4, peak_flops=1e12)
    for phase, seconds in (("rollout", 5.0), ("score", 0.5), ("update", 1.5)):
        with timers(phase):
            clock.now += seconds
    timers.count_flops(3e12, phases=("score", "update"))
    timers.count_flops(1e12, phases=("score", "update"))
    values = to_floats(timers.collect())
    assert values["perf/tflops"] == pytest.approx(0.5)
    assert values["perf/mfu"] == pytest.approx(0.5)
    assert "perf/tflops" not in to_floats(timers.collect())


def test_a_device_of_unknown_peak_has_no_share_of_it() -> None:
    clock = _Clock()
    timers = Timers(clock)
    with timers("update"):
        clock.now += 2.0
    timers.count_flops(1e12, phases=("update",))
    values = to_floats(timers.collect())
    assert values["perf/tflops"] == pytest.approx(0.5)
    assert "perf/mfu" not in values
