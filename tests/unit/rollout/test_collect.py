"""The collector: order, seeds, deadlines, failures that stay one episode's, cancellation."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from moerl.errors import ConfigError, RolloutError
from moerl.rollout.collect import Collector, CollectorHooks, group_starts
from moerl.rollout.engine import sample_seed
from moerl.types import Prompt, SamplingParams, Trajectory

PARAMS = SamplingParams(4)


def prompt(name: str, env: str = "play") -> Prompt:
    return Prompt(name, np.array([1, 2], dtype=np.int32), None, "d", env=env)


class Play:
    """An environment that awaits as its prompt's id says and writes down who ran."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}
        self.running = 0
        self.most = 0
        self.cancelled = 0

    async def run(self, prompt, engine, params, request_id):
        self.seeds[request_id] = params.seed
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._act(prompt.prompt_id, request_id)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return Trajectory(
            token_ids=np.array([1, 2, 9], dtype=np.int32),
            loss_mask=np.array([False, False, True]),
            rollout_logprobs=np.zeros(3, dtype=np.float32),
            temperature=1.0,
            finish_reason="stop",
            version_spans=((2, 3, 0),),
            response_text=request_id,
            status="too_long" if prompt.prompt_id == "long" else "ok",
        )

    async def _act(self, name: str, request_id: str) -> None:
        if name == "slow":
            await asyncio.sleep(0.05)
        if name == "stuck":
            await asyncio.Event().wait()
        if name == "broken" and request_id.endswith("#1"):
            raise RolloutError("no logprobs came")
        if name == "own_timeout":
            raise TimeoutError("the engine's own")
        if name == "ctrl_c":
            await asyncio.sleep(0.01)
            if request_id.endswith("#0"):
                signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        await asyncio.sleep(0)


class Score:
    def __init__(self) -> None:
        self.scored: list[str] = []

    async def score(self, prompt, trajectory):
        await asyncio.sleep(0.02 if prompt.prompt_id == "late_score" else 0)
        if prompt.prompt_id == "unscorable":
            raise ValueError("verifier broke")
        self.scored.append(trajectory.response_text)
        return replace(trajectory, reward=1.0, reward_components={"right": 1.0})

    def check_prompts(self, prompts):
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def stage():
    env, scorer = Play(), Score()
    made: list[Collector] = []

    def make(**changes) -> Collector:
        arguments = {"run_seed": 7, "timeout_seconds": 5.0, **changes}
        made.append(Collector(engine=object(), environments={"play": env}, scorer=scorer, **arguments))
        return made[-1]

    yield env, scorer, make
    for collector in made:
        collector.close()


def test_collectors_with_one_gate_share_its_places(stage):
    env, _, make = stage
    with asyncio.Runner() as runner:
        hooks = CollectorHooks(runner=runner, gate=asyncio.Semaphore(2))
        one, other = make(hooks=hooks), make(hooks=hooks)

        async def both():
            plays = [
                collector.play(prompt(f"p{i}"), 0, step=1, params=PARAMS)
                for collector in (one, other)
                for i in range(4)
            ]
            return await asyncio.gather(*plays)

        assert {trajectory.status for trajectory in runner.run(both())} == {"ok"}
    assert env.most == 2


def test_groups_are_in_prompt_order_whatever_finished_first(stage):
    _, scorer, make = stage
    groups = make().collect([prompt("slow"), prompt("a"), prompt("b")], step=0, group_size=2, params=PARAMS)
    assert [g.prompt.prompt_id for g in groups] == ["slow", "a", "b"]
    assert [[t.response_text for t in g.trajectories] for g in groups] == [
        ["slow#0", "slow#1"],
        ["a#0", "a#1"],
        ["b#0", "b#1"],
    ]
    assert scorer.scored[-2:] == ["slow#0", "slow#1"], "the quick ones were scored while the slow ones still ran"


def test_seeds_come_from_run_step_prompt_and_index(stage):
    env, _, make = stage
    make().collect([prompt("a")], step=3, group_size=2, params=PARAMS)
    assert env.seeds == {f"a#{i}": sample_seed(7, 3, "a", i) for i in range(2)}


def test_a_prompt_that_comes_twice_gets_new_samples(stage):
    env, _, make = stage
    make().collect([prompt("a"), prompt("b"), prompt("a")], step=0, group_size=2, params=PARAMS)
    assert sorted(env.seeds) == ["a#0", "a#1", "a#2", "a#3", "b#0", "b#1"]
    assert len(set(env.seeds.values())) == 6
    seen = Counter({"a": 1})
    assert group_starts(seen, [prompt("a"), prompt("b"), prompt("a")], 4) == [4, 0, 8]
    assert seen == {"a": 3, "b": 1}


def test_one_failing_episode_is_one_error_trajectory_with_the_reason(stage):
    _, scorer, make = stage
    (group,) = make().collect([prompt("broken")], step=0, group_size=3, params=PARAMS)
    fine, broken, other = group.trajectories
    assert (fine.status, other.status) == ("ok", "ok")
    assert (broken.status, broken.error) == ("error", "RolloutError: no logprobs came")
    assert broken.token_ids.tolist() == [1, 2]
    assert not broken.loss_mask.any()
    assert np.isnan(broken.reward)
    assert scorer.scored == ["broken#0", "broken#2"]


def test_a_late_episode_is_an_error_and_the_others_are_not(stage):
    env, _, make = stage
    collector = make(timeout_seconds=0.05)
    late, fine, own = collector.collect(
        [prompt("stuck"), prompt("a"), prompt("own_timeout")], step=0, group_size=1, params=PARAMS
    )
    assert late.trajectories[0].error == "TimeoutError: no end within 0.05 s (rollout.timeout_seconds)"
    assert own.trajectories[0].error == "TimeoutError: the engine's own"
    assert fine.trajectories[0].status == "ok"
    assert env.cancelled == 1


def test_scoring_is_not_under_the_episodes_deadline(stage):
    _, _, make = stage
    (group,) = make(timeout_seconds=0.01).collect([prompt("late_score")], step=0, group_size=1, params=PARAMS)
    assert group.trajectories[0].status == "ok"


def test_a_verifier_that_raises_keeps_the_tokens_and_gives_no_reward(stage):
    _, _, make = stage
    (group,) = make().collect([prompt("unscorable")], step=0, group_size=1, params=PARAMS)
    (got,) = group.trajectories
    assert (got.status, got.error, got.response_length) == ("error", "ValueError: verifier broke", 1)
    assert np.isnan(got.reward)


def test_what_was_never_played_is_not_scored(stage):
    _, scorer, make = stage
    (group,) = make().collect([prompt("long")], step=0, group_size=2, params=PARAMS)
    assert [t.status for t in group.trajectories] == ["too_long"] * 2
    assert scorer.scored == []


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_episodes_at_once_than_allowed(stage, limit):
    env, _, make = stage
    make(max_concurrency=limit).collect([prompt("a"), prompt("b")], step=0, group_size=4, params=PARAMS)
    assert env.most == limit


def test_progress_counts_every_episode(stage):
    _, _, make = stage
    seen: list[tuple[int, int]] = []
    collector = make(hooks=CollectorHooks(on_progress=lambda done, total: seen.append((done, total))))
    collector.collect([prompt("a"), prompt("broken")], step=0, group_size=2, params=PARAMS)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_ctrl_c_cancels_every_episode_and_travels_on(stage):
    env, scorer, make = stage
    collector = make()
    with pytest.raises(KeyboardInterrupt):
        collector.collect([prompt("stuck"), prompt("ctrl_c"), prompt("stuck")], step=0, group_size=2, params=PARAMS)
    assert env.running == 0
    assert env.cancelled == 6
    assert scorer.scored == []


def test_an_environment_that_is_not_there_is_named(stage):
    _, _, make = stage
    with pytest.raises(ConfigError, match="prompt a: no environment 'maze' is set up; known: play"):
        make().collect([prompt("a", env="maze")], step=0, group_size=1, params=PARAMS)


def test_impossible_limits_are_refused(stage):
    _, _, make = stage
    with pytest.raises(ConfigError, match="timeout_seconds=0"):
        make(timeout_seconds=0)
    with pytest.raises(ConfigError, match="max_concurrency=0"):
        make(max_concurrency=0)


def test_nothing_to_do_is_no_groups(stage):
    assert stage[2]().collect([], step=0, group_size=4, params=PARAMS) == []


def test_the_loop_is_lent_to_what_must_run_on_it(stage):
    _, _, make = stage
    collector = make()

    async def loop_id() -> int:
        return id(asyncio.get_running_loop())

    assert collector.run(loop_id()) == collector.run(loop_id())
