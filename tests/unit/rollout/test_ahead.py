"""The buffer that runs ahead, move by move: what it starts, waits for, drops, refills, counts and raises."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import numpy as np
import pytest
from scheduled_rollouts import PROMPT_LENGTH, Bench, Draws, Take, trajectory_of

from moerl.errors import CheckpointError, DataError, RolloutError
from moerl.metrics import to_floats
from moerl.rollout.ahead import AheadBuffer, AheadRooms
from moerl.rollout.buffer import RolloutBuffer
from moerl.rollout.collect import Collector, CollectorHooks
from moerl.rollout.engine import sample_seed
from moerl.rollout.loop_thread import LoopThread
from moerl.rollout.plan import PlanSettings
from moerl.rollout.rollout_metrics import staleness_metrics
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

SECONDS = 60


def sizes(**changes) -> PlanSettings:
    values = {
        "prompts_per_step": 2,
        "started_per_step": 2,
        "max_staleness": 1,
        "refill_rounds": 0,
        "long_tail": "wait",
        **changes,
    }
    return PlanSettings(**values)


@pytest.fixture
def bench_of():
    made: list[Bench] = []

    def make(**options) -> Bench:
        plan = options.pop("plan", None) or sizes(**{k: options.pop(k) for k in list(options) if k in SIZES})
        made.append(Bench(plan, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


SIZES = ("prompts_per_step", "started_per_step", "max_staleness", "refill_rounds", "long_tail")


def prompts(bench: Bench) -> list[str]:
    return [request.prompt_id for request in bench.waiting()]


def ids(groups) -> list[str]:
    return [group.prompt.prompt_id for group in groups]


def finish(bench: Bench, *names: str, **options) -> None:
    for name in names:
        for request in [one for one in bench.waiting() if one.prompt_id == f"p/{name}"]:
            bench.finish(request, **options)


def test_steps_ahead_are_started_as_versions_allow(bench_of):
    bench = bench_of(max_staleness=2)
    assert prompts(bench) == [], "there are no weights yet"
    bench.publish(0)
    assert prompts(bench) == [f"p/{i}" for i in range(6)], "the first step and two ahead"
    bench.finish_all()
    groups, _ = bench.buffer.take(1, 0)
    assert ids(groups) == ["p/0", "p/1"]
    assert prompts(bench) == [], "while version 0 trains, what is started now could be three updates old"
    bench.publish(1)
    assert prompts(bench) == ["p/6", "p/7"]


def test_a_step_that_is_ready_does_not_wait(bench_of):
    bench = bench_of()
    bench.publish(0)
    finish(bench, "0", "1")
    groups, metrics = bench.buffer.take(1, 0)
    assert ids(groups) == ["p/0", "p/1"]
    values = to_floats(metrics)
    assert (values["rollout/buffered_groups"], values["rollout/running_groups"]) == (0, 2)


def test_waiting_keeps_the_order_of_the_prompts(bench_of):
    bench = bench_of(long_tail="wait")
    bench.publish(0)
    future = Take(bench, 1, 0)
    finish(bench, "3", "2", "1")
    assert not future.done()
    finish(bench, "0")
    assert ids(future.result()[0]) == ["p/0", "p/1"]


def test_resuming_trains_on_what_is_finished_and_waits_at_the_deadline(bench_of):
    bench = bench_of(long_tail="resume")
    bench.publish(0)
    finish(bench, "1", "2")
    groups, _ = bench.buffer.take(1, 0)
    assert ids(groups) == ["p/1", "p/2"], "p/0 and p/3 can still be trained on by the next step"
    bench.publish(1)
    assert prompts(bench) == ["p/0", "p/3", "p/4", "p/5"]
    future = Take(bench, 2, 1)
    finish(bench, "4", "5")
    finish(bench, "0")
    assert not future.done(), "p/3 would be too old for a later step"
    finish(bench, "3")
    groups, metrics = future.result()
    assert ids(groups) == ["p/0", "p/3"]
    values = to_floats(metrics)
    assert values["rollout/staleness_max"] == 1
    assert values["rollout/staleness_mean"] == values["rollout/staleness_fraction"] == 0.5
    assert values["rollout/staleness_mixed_fraction"] == 1
    assert values["rollout/groups_dropped"] == 0


def test_no_more_is_left_for_later_than_later_steps_can_train_on(bench_of):
    """Staleness 2: three stragglers of version 0 with room for two of them a step; the third must come at once."""
    bench = bench_of(long_tail="resume", max_staleness=2, prompts_per_step=1, started_per_step=1)
    bench.publish(0)
    assert prompts(bench) == ["p/0", "p/1", "p/2"]
    future = Take(bench, 1, 0)
    finish(bench, "1")
    assert ids(future.result()[0]) == ["p/1"]
    bench.publish(1)
    future = Take(bench, 2, 1)
    finish(bench, "3")
    assert not future.done(), "p/0 and p/2 both end with version 2, which trains on one group"
    finish(bench, "0")
    assert ids(future.result()[0]) == ["p/0"]


def test_dropping_cuts_off_what_is_late_and_counts_it(bench_of):
    bench = bench_of(long_tail="drop", group_size=2)
    bench.publish(0)
    finish(bench, "1", "2")
    assert ids(bench.buffer.take(1, 0)[0]) == ["p/1", "p/2"]
    bench.publish(1)
    finish(bench, "4", "5")
    groups, metrics = bench.buffer.take(2, 1)
    assert ids(groups) == ["p/4", "p/5"]
    bench.settle()
    assert prompts(bench) == [f"p/{i}" for i in (6, 6, 7, 7)], "both are cut off at the engine too; others take over"
    values = to_floats(metrics)
    assert (values["rollout/dropped_late"], values["rollout/dropped_stale"]) == (2, 0)
    assert values["rollout/groups_dropped"] == 2
    bench.publish(2)
    assert prompts(bench) == [f"p/{i}" for i in (6, 6, 7, 7, 8, 8, 9, 9)]
    assert bench.observed == ["p/1", "p/2", "p/4", "p/5"]


def test_what_is_left_over_of_over_sampling_is_dropped_once_too_old(bench_of):
    bench = bench_of(long_tail="drop", prompts_per_step=1, started_per_step=2)
    bench.publish(0)
    assert len(prompts(bench)) == 4
    bench.finish_all()
    bench.buffer.take(1, 0)
    bench.publish(1)
    groups, metrics = bench.buffer.take(2, 1)
    values = to_floats(metrics)
    assert ids(groups) == ["p/1"]
    assert (values["rollout/dropped_stale"], values["rollout/dropped_late"]) == (2, 0)


def drop_odd(group: RolloutGroup) -> str | None:
    return "odd" if int(group.prompt.prompt_id[2:]) % 2 else None


@pytest.mark.parametrize(("rounds", "trained"), [(0, ["p/0", "p/2"]), (1, ["p/0", "p/2", "p/8"])])
def test_dropped_groups_are_refilled_at_once_and_within_the_bound(bench_of, rounds, trained):
    bench = bench_of(group_filter=drop_odd, refill_rounds=rounds, prompts_per_step=4, started_per_step=4)
    bench.publish(0)
    finish(bench, *"0123")
    assert len(prompts(bench)) == 4 + 2 * rounds, "replacements start as a group is dropped"
    future = Take(bench, 1, 0)
    finish(bench, "8", "9")
    if rounds:
        finish(bench, "10", "11")
    groups, metrics = future.result()
    assert ids(groups)[: len(trained)] == trained
    values = to_floats(metrics)
    assert values["rollout/filter/odd"] == values["rollout/groups_dropped"]
    assert values["rollout/groups"] == len(groups)


def test_a_group_in_which_all_failed_is_dropped_and_not_shown_to_filters(bench_of):
    bench = bench_of()
    bench.publish(0)
    finish(bench, "0", trajectory=trajectory_of([0], status="error"))
    finish(bench, "1")
    groups, metrics = bench.buffer.take(1, 0)
    assert ids(groups) == ["p/1"]
    values = to_floats(metrics)
    assert values["rollout/filter/all_failed"] == 1
    assert values["rollout/errors/TimeoutError"] == 1
    assert bench.observed == ["p/1"]


def test_too_many_failures_stop_the_run(bench_of):
    bench = bench_of(max_error_fraction=0.4)
    bench.publish(0)
    finish(bench, "0", trajectory=trajectory_of([0], status="error"))
    finish(bench, "1")
    with pytest.raises(RolloutError, match=r"step 1: 1 of 2 episodes failed, more than reward.max_error_fraction=0.4"):
        bench.buffer.take(1, 0)


def test_staleness_counts_tokens_of_every_span():
    group = RolloutGroup(Draws().find("p/0"), (trajectory_of([3, 3, 3, 5]), trajectory_of([5]), trajectory_of([])))
    values = to_floats(staleness_metrics([group], 5))
    assert values == {
        "rollout/staleness_mean": 6 / 5,
        "rollout/staleness_max": 2,
        "rollout/staleness_fraction": 3 / 5,
        "rollout/staleness_mixed_fraction": 1 / 2,
    }


def test_an_engine_that_serves_old_weights_is_found_out(bench_of):
    bench = bench_of(prompts_per_step=1, started_per_step=1)
    bench.publish(4)
    finish(bench, "0", trajectory=trajectory_of([3, 4]))
    with pytest.raises(RolloutError, match=r"p/0: got tokens of policy version 3, but version 4 was published before"):
        bench.buffer.take(1, 4)


class Dry(Draws):
    def next_prompts(self, count: int) -> list[Prompt]:
        if self.cursor >= 3:
            raise DataError("nothing is left to sample")
        return super().next_prompts(count)


def test_what_fails_on_the_rollout_thread_is_raised_by_the_next_step(bench_of):
    bench = bench_of(source=Dry())
    bench.publish(0)
    with pytest.raises(DataError, match="nothing is left to sample"):
        bench.buffer.take(1, 0)


def test_a_defect_in_an_episode_is_raised_while_a_step_waits(bench_of):
    bench = bench_of()
    bench.publish(0)
    future = Take(bench, 1, 0)

    async def break_one() -> None:
        bench.waiting()[0].answer.set_exception(KeyError("a defect"))

    bench.thread.run(break_one())
    with pytest.raises(KeyError, match="a defect"):
        future.result()


def test_closing_cuts_off_what_runs_and_a_closed_buffer_says_so(bench_of):
    bench = bench_of()
    bench.publish(0)
    bench.close()
    assert bench.play.waiting == {}
    with pytest.raises(RolloutError, match="the rollout thread is closed"):
        bench.buffer.take(1, 0)


def test_ctrl_c_ends_the_wait(bench_of):
    bench = bench_of()
    bench.publish(0)

    async def interrupt() -> None:
        while bench.buffer._plan.step:  # not before the step waits
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.2, lambda: bench.thread.run(interrupt())).start()
    with pytest.raises(KeyboardInterrupt):
        bench.buffer.take(1, 0)
    bench.close()
    assert bench.play.waiting == {}


def test_state_that_lacks_something_is_refused(bench_of):
    bench = bench_of()
    with pytest.raises(CheckpointError, match="lacks plan, dropped; use a checkpoint of this version"):
        bench.buffer.load_state_dict({"source": {}, "prompts_used": 0, "groups_dropped": 0, "errors": 0})
    state = bench.buffer.state_dict()
    del state["plan"]["lost"]
    with pytest.raises(CheckpointError, match="plan is damaged \\(KeyError: 'lost'\\)"):
        bench.buffer.load_state_dict(state)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlap_is_the_share_of_a_step_in_which_both_sides_work():
    thread, clock, source = LoopThread(), Clock(), Draws()
    answers: list[asyncio.Future[Trajectory]] = []

    async def play(prompt, index, *, step, params, number=None):
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    rooms = AheadRooms(thread=thread, source=source, find=source.find, play=play, params=SamplingParams(4), clock=clock)
    buffer = AheadBuffer(rooms, sizes(prompts_per_step=1, started_per_step=1), group_size=1)

    def finish_at(place: int, now: float) -> None:
        async def finish():
            clock.now = now
            answers[place].set_result(trajectory_of([0]))
            for _ in range(5):
                await asyncio.sleep(0)

        thread.run(finish())

    buffer.published(0)
    thread.run(asyncio.sleep(0))
    finish_at(0, 4.0)
    clock.now = 5.0
    values = to_floats(buffer.take(1, 0)[1])
    assert values["perf/overlap_fraction"] == 1.0, "something was under way from 0 to 5"
    assert values["perf/generation_seconds"] == 5.0
    assert values["perf/rollout_wait_seconds"] == 0.0
    finish_at(1, 7.0)
    clock.now = 13.0
    buffer.published(1)
    values = to_floats(buffer.take(2, 1)[1])
    assert values["perf/overlap_fraction"] == 2.0 / 8.0
    assert values["perf/generation_seconds"] == 2.0
    thread.close()


class Seeds:
    """An environment that takes down what it is asked with."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    async def run(self, prompt, engine, params, request_id):
        self.seen.append((prompt.prompt_id, params.seed))
        return trajectory_of([0])


class NoScore:
    async def score(self, prompt, trajectory):
        return trajectory

    def check_prompts(self, prompts):
        return []

    def close(self) -> None:
        pass


class Round(Draws):
    """Three prompts, round and round: one comes twice within a step of four."""

    def next_prompts(self, count: int) -> list[Prompt]:
        self.cursor += count
        return [self.find(f"p/{row % 3}") for row in range(self.cursor - count, self.cursor)]


def test_seeds_are_those_of_synchronous_training():
    def collector(env, **hooks) -> Collector:
        return Collector(
            engine=object(),  # pyright: ignore[reportArgumentType]
            environments={"play": env},
            scorer=NoScore(),
            run_seed=7,
            timeout_seconds=SECONDS,
            hooks=CollectorHooks(**hooks),
        )

    there, here, thread, source = Seeds(), Seeds(), LoopThread(), Round()
    synchronous = collector(there)
    buffer = RolloutBuffer(
        source=Round(), collector=synchronous, params=SamplingParams(4), prompts_per_step=4, group_size=2
    )
    ahead_collector = collector(here, runner=thread)
    rooms = AheadRooms(
        thread=thread, source=source, find=source.find, play=ahead_collector.play, params=SamplingParams(4)
    )
    ahead = AheadBuffer(rooms, sizes(prompts_per_step=4, started_per_step=4), group_size=2)
    for step in (1, 2, 3):
        assert ids(buffer.take(step, 0)[0]) == ids(ahead.take(step, 0)[0])
    synchronous.close()
    ahead_collector.close()
    assert sorted(here.seen[: len(there.seen)]) == sorted(there.seen)
    assert (there.seen[0][0], there.seen[0][1]) == ("p/0", sample_seed(7, 1, "p/0", 0))
    assert len({seed for _, seed in here.seen}) == len(here.seen)
    assert np.array_equal(Draws().find("p/1").token_ids, np.arange(PROMPT_LENGTH))
