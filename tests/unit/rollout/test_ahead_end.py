"""The end of a run that generates ahead: nothing is started for later steps, until a longer run goes on with it."""

from __future__ import annotations

import pytest
from scheduled_rollouts import Bench

from moerl.rollout.plan import PlanSettings


@pytest.fixture
def bench_of():
    made: list[Bench] = []

    def make(*, size=2, started=2, staleness=1, long_tail="wait", last_step) -> Bench:
        made.append(Bench(PlanSettings(size, started, staleness, 0, long_tail, last_step)))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def ids(groups) -> list[str]:
    return [group.prompt.prompt_id for group in groups]


@pytest.mark.parametrize("long_tail", ["wait", "resume", "drop"])
def test_nothing_is_started_for_steps_after_the_last_one(bench_of, long_tail):
    bench = bench_of(staleness=2, last_step=3, long_tail=long_tail)
    for version in range(3):
        bench.publish(version)
        bench.finish_all()
        assert len(bench.buffer.take(version + 1, version)[0]) == 2
    bench.publish(3)
    assert bench.waiting() == [], "a final evaluation would wait behind them"
    assert bench.source.cursor == len(bench.play.asked) == 6
    assert bench.buffer.state_dict()["plan"]["tickets"] == []


def test_the_end_is_over_sampled_like_every_other_step(bench_of):
    bench = bench_of(last_step=2, long_tail="drop", size=1, started=2)
    for version in range(2):
        bench.publish(version)
        bench.finish_all()
        bench.buffer.take(version + 1, version)
    bench.publish(2)
    assert bench.source.cursor == len(bench.play.asked) == 4, "two for each step"


@pytest.mark.parametrize("long_tail", ["wait", "resume", "drop"])
def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one_as_if_it_had_been_longer(bench_of, long_tail):
    def asked(bench):
        return sorted((one.step, one.prompt_id, one.index, one.number) for one in bench.play.asked)

    def walk(bench, steps):
        for step in steps:
            bench.publish(step - 1)
            bench.finish_all()
            trained.append(ids(bench.buffer.take(step, step - 1)[0]))
        bench.publish(steps[-1])

    trained = []
    whole = bench_of(last_step=5, long_tail=long_tail)
    walk(whole, range(1, 6))
    expected, trained = trained, []
    short = bench_of(last_step=2, long_tail=long_tail)
    walk(short, range(1, 3))
    longer = bench_of(last_step=5, long_tail=long_tail)
    longer.buffer.load_state_dict(short.buffer.state_dict())
    walk(longer, range(3, 6))
    assert trained == expected
    assert sorted([*asked(short), *asked(longer)]) == asked(whole), "the same episodes, with the same seeds"
