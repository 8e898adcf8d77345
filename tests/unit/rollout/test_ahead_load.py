"""A restored buffer of asynchronous training: what was finished when it was saved is filtered like everything else."""

from __future__ import annotations

import pytest
from scheduled_rollouts import Bench

from moerl.metrics import to_floats
from moerl.rollout.plan import PlanSettings
from moerl.types import RolloutGroup

SIZES = PlanSettings(prompts_per_step=2, started_per_step=2, max_staleness=1, refill_rounds=0, long_tail="wait")


@pytest.fixture
def bench_of():
    made: list[Bench] = []

    def make(**options) -> Bench:
        made.append(Bench(SIZES, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def drop_odd(group: RolloutGroup) -> str | None:
    return "odd" if int(group.prompt.prompt_id[2:]) % 2 else None


def test_a_group_that_was_saved_before_the_filter_saw_it_is_filtered_when_it_is_loaded(bench_of):
    """A state may be taken on the loop's turn between a group's last episode and its filter."""
    first = bench_of()
    first.publish(0)
    for request in first.waiting():
        if request.prompt_id in ("p/0", "p/1"):
            first.finish(request)
    again = bench_of(group_filter=drop_odd)
    again.buffer.load_state_dict(first.buffer.state_dict())
    again.publish(0)
    groups, metrics = again.buffer.take(1, 0)
    assert [group.prompt.prompt_id for group in groups] == ["p/0"]
    assert to_floats(metrics)["rollout/filter/odd"] == 1
