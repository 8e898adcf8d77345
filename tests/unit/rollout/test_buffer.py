"""The buffer: exact refills, counted drops, bounded failures, staleness, metrics with closed forms, saved state."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from moerl.errors import CheckpointError, ConfigError, RolloutError
from moerl.metrics import to_floats
from moerl.rollout.buffer import RolloutBuffer
from moerl.rollout.collect import Collector
from moerl.rollout.rollout_metrics import error_kind, rollout_metrics
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory


class Source:
    """Prompts p/0, p/1, ... over `size` rows, round and round."""

    def __init__(self, size: int = 1000) -> None:
        self.size, self.cursor = size, 0
        self.asked: list[int] = []

    def next_prompts(self, count: int) -> list[Prompt]:
        self.asked.append(count)
        rows = [(self.cursor + i) % self.size for i in range(count)]
        self.cursor += count
        return [Prompt(f"p/{row}", np.array([1, 2, 3], dtype=np.int32), None, "p", env="play") for row in rows]

    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state) -> None:
        self.cursor = state["cursor"]


class Play:
    """Sample i of row r: r % 4 + 1 tokens; rows whose number is in `fails` raise."""

    def __init__(self) -> None:
        self.version = 0
        self.fails: set[int] = set()
        self.too_long: set[int] = set()
        self.aborted: set[int] = set()
        self.requests: list[tuple[str, int]] = []

    async def run(self, prompt, engine, params, request_id):
        row = int(prompt.prompt_id.partition("/")[2])
        self.requests.append((request_id, params.seed))
        if row in self.fails:
            raise RolloutError(f"request {request_id}: lost")
        count = 0 if row in self.too_long else row % 4 + 1
        status = "aborted" if row in self.aborted else "ok" if count else "too_long"
        return Trajectory(
            token_ids=np.arange(3 + count, dtype=np.int32),
            loss_mask=np.arange(3 + count) >= 3,
            rollout_logprobs=np.zeros(3 + count, dtype=np.float32),
            temperature=1.0,
            finish_reason="length" if count == 4 else "stop",
            version_spans=((3, 3 + count, self.version),) if count else (),
            status=status,
            error=f"request {request_id} was aborted 9 times" if status == "aborted" else "",
        )


class Score:
    async def score(self, prompt, trajectory):
        row = int(prompt.prompt_id.partition("/")[2])
        return replace(trajectory, reward=float(row), reward_components={"row": float(row), "one": 1.0})

    def check_prompts(self, prompts):
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def stage():
    source, env = Source(), Play()
    collector = Collector(engine=object(), environments={"play": env}, scorer=Score(), run_seed=0, timeout_seconds=5.0)

    def make(**changes) -> RolloutBuffer:
        arguments = {"params": SamplingParams(4), "prompts_per_step": 4, "group_size": 2, **changes}
        return RolloutBuffer(source=arguments.pop("source", source), collector=collector, **arguments)

    yield source, env, make
    collector.close()


def ids(groups) -> list[str]:
    return [group.prompt.prompt_id for group in groups]


def drop_odd(group: RolloutGroup) -> str | None:
    return "odd" if group.trajectories[0].reward % 2 else None


def drop_all(group: RolloutGroup) -> str | None:
    return "too_easy" if group.trajectories[0].reward % 2 else "too_hard"


def test_without_a_filter_a_step_is_what_was_asked_for(stage):
    source, _, make = stage
    groups, metrics = make().take(0, 0)
    assert ids(groups) == ["p/0", "p/1", "p/2", "p/3"]
    assert source.asked == [4]
    values = to_floats(metrics)
    assert (values["rollout/groups"], values["rollout/groups_dropped"], values["rollout/refill_rounds"]) == (4, 0, 0)


def test_only_the_missing_number_is_asked_for_again(stage):
    source, _, make = stage
    groups, metrics = make(group_filter=drop_odd, refill_rounds=5).take(0, 0)
    assert ids(groups) == ["p/0", "p/2", "p/4", "p/6"]
    assert source.asked == [4, 2, 1]
    values = to_floats(metrics)
    assert values["rollout/groups"] == 4
    assert values["rollout/groups_dropped"] == values["rollout/filter/odd"] == 3
    assert values["rollout/refill_rounds"] == 2
    assert values["rollout/prompts_used"] == 7


@pytest.mark.parametrize(("rounds", "asked", "left"), [(0, [4], 2), (1, [4, 2], 3), (2, [4, 2, 1], 4)])
def test_refills_are_bounded_and_fewer_groups_may_come(stage, rounds, asked, left):
    source, _, make = stage
    groups, _ = make(group_filter=drop_odd, refill_rounds=rounds).take(0, 0)
    assert source.asked == asked
    assert len(groups) == left


def test_every_reason_is_counted_and_all_may_be_dropped(stage):
    groups, metrics = stage[2](group_filter=drop_all, refill_rounds=1).take(0, 0)
    values = to_floats(metrics)
    assert groups == []
    assert (values["rollout/filter/too_easy"], values["rollout/filter/too_hard"]) == (4, 4)


def test_a_prompt_that_a_refill_brings_again_gets_new_samples(stage):
    _, env, make = stage
    buffer = make(source=Source(size=3), group_filter=drop_all, refill_rounds=1)
    buffer.take(0, 0)
    names = [name for name, _ in env.requests]
    assert len(names) == len(set(names)) == 16
    assert len({seed for _, seed in env.requests}) == 16
    env.requests.clear()
    buffer.take(1, 0)
    assert min(int(name.partition("#")[2]) for name, _ in env.requests) == 0, "indices start anew with each step"


def test_metrics_have_their_closed_forms(stage):
    """Rows 0..3 twice: lengths 1, 2, 3, 4; rewards 0..3; the longest is cut."""
    _, env, make = stage
    env.version = 2
    values = to_floats(make().take(5, 2)[1])
    assert values["rollout/tokens"] == 20
    assert values["rollout/response_length"] == 2.5
    assert values["rollout/response_length_max"] == 4
    assert values["rollout/truncated_fraction"] == 0.25
    assert values["rollout/staleness_mean"] == 0
    assert values["reward/mean"] == values["reward/row"] == 1.5
    assert values["reward/one"] == 1
    assert values["reward/std"] == pytest.approx(np.std([0, 1, 2, 3]))
    assert values["rollout/errors"] == 0


def test_staleness_is_a_mean_over_tokens_not_over_spans_or_episodes():
    one = Trajectory(
        token_ids=np.zeros(10, dtype=np.int32),
        loss_mask=np.arange(10) >= 2,
        rollout_logprobs=np.zeros(10, dtype=np.float32),
        temperature=1.0,
        finish_reason="stop",
        version_spans=((2, 8, 5), (8, 10, 3)),
    )
    other = replace(one, loss_mask=np.arange(10) >= 8, version_spans=((8, 10, 4),))
    group = RolloutGroup(Prompt("p/0", np.zeros(2, dtype=np.int32), None, "p"), (one, other))
    assert to_floats(rollout_metrics([group], 5))["rollout/staleness_mean"] == (6 * 0 + 2 * 2 + 2 * 1) / 10


def test_tokens_of_an_older_version_stop_the_step(stage):
    _, env, make = stage
    env.version = 2
    with pytest.raises(RolloutError, match=r"got tokens of policy version 2 for version 3.*publish the weights"):
        make().take(0, 3)


def test_dropped_groups_count_in_the_reward(stage):
    values = to_floats(stage[2](group_filter=drop_odd).take(0, 0)[1])
    assert values["reward/mean"] == 1.5, "0, 1, 2, 3 were sampled; the accepted 0 and 2 alone would give 1"


def test_failed_groups_are_dropped_counted_and_refilled(stage):
    _, env, make = stage
    env.fails = {1}
    groups, metrics = make(refill_rounds=1, max_error_fraction=0.25).take(0, 0)
    assert ids(groups) == ["p/0", "p/2", "p/3", "p/4"]
    values = to_floats(metrics)
    assert values["rollout/filter/all_failed"] == 1
    assert values["rollout/errors"] == values["rollout/errors/RolloutError"] == 2
    assert values["reward/mean"] == pytest.approx((0 + 2 + 3 + 4) / 4)


def test_prompts_that_leave_no_room_are_no_errors_and_no_rewards(stage):
    _, env, make = stage
    env.too_long = {1}
    groups, metrics = make(max_error_fraction=0.0).take(0, 0)
    values = to_floats(metrics)
    assert ids(groups) == ["p/0", "p/2", "p/3"]
    assert (values["rollout/too_long"], values["rollout/errors"]) == (2, 0)
    assert values["rollout/response_length"] == pytest.approx((1 + 3 + 4) / 3)


def test_too_many_failures_stop_the_run_and_say_what_failed(stage):
    _, env, make = stage
    env.fails = {2}
    message = (
        r"2 of 8 episodes failed.*max_error_fraction=0\.2 allows \(2 RolloutError; first: RolloutError: request p/2#0"
    )
    with pytest.raises(RolloutError, match=message):
        make(max_error_fraction=0.2).take(0, 0)
    env.fails = {6}
    assert len(make(max_error_fraction=0.25).take(0, 0)[0]) == 3, "exactly the allowed share is allowed"


def test_answers_that_the_engine_aborts_are_counted_and_bounded_as_failures(stage):
    """Before, an engine that aborts all of them gave step after step of nothing, and exit status 0."""
    _, env, make = stage
    env.aborted = {1, 2}
    groups, metrics = make(max_error_fraction=0.5).take(0, 0)
    values = to_floats(metrics)
    assert ids(groups) == ["p/0", "p/3"]
    assert (values["rollout/aborted"], values["rollout/errors"], values["rollout/filter/all_failed"]) == (4, 0, 2)
    assert values["reward/mean"] == 1.5, "they have no reward"
    env.aborted, env.fails = {4, 5}, {6}
    message = (
        r"step 1: 6 of 8 episodes failed.* allows \(4 aborted, 2 RolloutError; first: request p/4#0 was aborted 9 times"
    )
    with pytest.raises(RolloutError, match=message):
        make(max_error_fraction=0.5).take(1, 0)


def test_saved_state_goes_on_where_it_was(stage):
    source, _, make = stage
    buffer = make(group_filter=drop_odd, refill_rounds=1)
    buffer.take(0, 0)
    state = json.loads(json.dumps(buffer.state_dict()))
    assert state == {"source": {"cursor": 6}, "prompts_used": 6, "groups_dropped": 3, "errors": 0}
    expected = ids(buffer.take(0, 0)[0])
    source.cursor = 0
    fresh = make(group_filter=drop_odd, refill_rounds=1)
    fresh.load_state_dict(state)
    assert ids(fresh.take(0, 0)[0]) == expected
    assert fresh.state_dict() == buffer.state_dict()


def test_state_of_something_else_is_refused(stage):
    with pytest.raises(CheckpointError, match="lacks source, groups_dropped"):
        stage[2]().load_state_dict({"prompts_used": 1, "errors": 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts_per_step": 0}, "prompts_per_step=0"),
        ({"group_size": 0}, "group_size=0"),
        ({"refill_rounds": -1}, "refill_rounds=-1"),
        ({"max_error_fraction": 1.5}, "max_error_fraction=1.5"),
    ],
)
def test_impossible_sizes_are_refused(stage, changes, message):
    with pytest.raises(ConfigError, match=message):
        stage[2](**changes)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("TimeoutError: no end within 5 s", "TimeoutError"),
        ("math_verify: worker died", "math_verify"),
        ("out of memory", "out_of_memory"),
        ("", "unknown"),
        ("a/b c: x", "a_b_c"),
    ],
)
def test_error_kinds_are_metric_names(error, kind):
    assert error_kind(error) == kind
