"""Prompts by their pass rates: what is passed over, when the run stops, what a checkpoint holds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moerl.algorithms.filtering import build_filters
from moerl.config.schema import RefilterSection
from moerl.curriculum import MAX_ROUNDS, Curriculum
from moerl.errors import CheckpointError, DataError
from moerl.metrics import to_floats
from moerl.types import Prompt, RolloutGroup, Trajectory

NAMES = ("a", "b", "c", "d")


def prompt(name):
    return Prompt(name, np.array([1], dtype=np.int32), None, "d")


def group(name, *rewards, status="ok"):
    tokens = np.array([1, 2], dtype=np.int32)
    trajectories = tuple(
        Trajectory(
            token_ids=tokens,
            loss_mask=np.array([False, True]),
            rollout_logprobs=np.zeros(2, dtype=np.float32),
            temperature=1.0,
            finish_reason="stop",
            version_spans=((1, 2, 0),),
            reward=reward,
            status=status,
        )
        for reward in rewards
    )
    return RolloutGroup(prompt(name), trajectories)


class Circle:
    """A source that goes round the prompts."""

    def __init__(self):
        self.at = 0

    def next_prompts(self, count):
        names = [NAMES[(self.at + i) % len(NAMES)] for i in range(count)]
        self.at += count
        return [prompt(name) for name in names]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Buffer:
    """Draws two prompts a step through the curated source and shows their groups to the filter."""

    def __init__(self, curriculum, rewards):
        self.source = curriculum.source(Circle())
        self.look = curriculum.group_filter(lambda group: None)
        self.rewards = rewards

    def take(self, step, version):
        groups = [group(p.prompt_id, *self.rewards[p.prompt_id]) for p in self.source.next_prompts(2)]
        assert [self.look(one) for one in groups] == [None, None]
        return groups, {}

    def state_dict(self):
        return {"source": self.source.state_dict()}

    def load_state_dict(self, state):
        self.source.load_state_dict(state["source"])


REWARDS = {"a": (1.0, 1.0), "b": (0.0, 1.0), "c": (1.0, 1.0), "d": (0.0, 0.0)}


def curated(nodes, rewards=REWARDS):
    curriculum = Curriculum(build_filters(nodes).prompt, len(NAMES))
    return curriculum, curriculum.rollouts(Buffer(curriculum, rewards))


def names_of(rollouts, step):
    groups, metrics = rollouts.take(step, 0)
    return [one.prompt.prompt_id for one in groups], to_floats(metrics)["rollout/prompts_passed_over"]


def test_learned_prompts_do_not_come_again():
    _, rollouts = curated([{"name": "no_positive_resampling", "threshold": 0.9}])
    assert names_of(rollouts, 1) == (["a", "b"], 0.0)
    assert names_of(rollouts, 2) == (["c", "d"], 0.0)
    assert names_of(rollouts, 3) == (["b", "d"], 2.0)
    assert names_of(rollouts, 4) == (["b", "d"], 2.0)


def test_prompts_outside_the_band_come_back_for_another_estimate():
    _, rollouts = curated([{"name": "pass_rate_band", "low": 0.2, "high": 0.8, "every_steps": 3}])
    seen = [names_of(rollouts, step)[0] for step in range(1, 5)]
    assert seen[:2] == [["a", "b"], ["c", "d"]]
    assert seen[2] == ["b", "b"]
    assert seen[3][0] == "b" or "a" in seen[3]
    assert "a" in names_of(rollouts, 5)[0] + seen[3]


def test_a_run_with_nothing_left_stops_and_says_why():
    _, rollouts = curated([{"name": "no_positive_resampling"}], {name: (1.0, 1.0) for name in NAMES})
    rollouts.take(1, 0)
    rollouts.take(2, 0)
    with pytest.raises(DataError, match=f"step 3: {MAX_ROUNDS * len(NAMES) + 1} prompts in a row"):
        rollouts.take(3, 0)


def test_failed_and_unscored_answers_are_not_counted():
    curriculum, _ = curated([])
    look = curriculum.group_filter(lambda group: "dropped")
    assert look(group("a", 1.0, float("nan"), 0.0)) == "dropped"
    look(group("a", 1.0, status="error"))
    assert curriculum.rates.of("a").answers == 2
    assert curriculum.rates.of("a").passed == 1


def test_every_step_s_visits_are_logged_and_counted():
    logged = []
    curriculum = Curriculum(build_filters([]).prompt, 4, log=lambda step, visits: logged.append((step, list(visits))))
    rollouts = curriculum.rollouts(Buffer(curriculum, REWARDS))
    metrics = [to_floats(rollouts.take(step, 0)[1]) for step in (1, 2, 3)]
    assert logged == [(1, [("a", 2, 2), ("b", 2, 1)]), (2, [("c", 2, 2), ("d", 2, 0)]), (3, [("a", 2, 2), ("b", 2, 1)])]
    assert [one["data/prompts_seen"] for one in metrics] == [2.0, 4.0, 4.0]
    assert [one["data/always_passed_fraction"] for one in metrics] == [0.5, 0.5, 0.5]
    assert [one["data/never_passed_fraction"] for one in metrics] == [0.0, 0.25, 0.25]


def test_re_filtering_chooses_what_is_sampled_until_the_next_time():
    rule = RefilterSection(every_steps=3, low=0.2, high=0.8, return_after=1)
    curriculum = Curriculum(build_filters([]).prompt, 4, rule)
    rollouts = curriculum.rollouts(Buffer(curriculum, REWARDS))
    seen = [names_of(rollouts, step)[0] for step in range(1, 8)]
    assert seen[:2] == [["a", "b"], ["c", "d"]]
    assert seen[2:5] == [["b", "b"]] * 3  # left out: a, c, d
    assert set(seen[5] + seen[6]) == {"a", "b", "c", "d"}  # decided anew before step 6


def test_re_filtering_resumes_where_it_was():
    rule = RefilterSection(every_steps=2, low=0.2, high=0.8)

    def fresh():
        curriculum = Curriculum(build_filters([]).prompt, 4, rule)
        return curriculum.rollouts(Buffer(curriculum, REWARDS))

    whole, broken = fresh(), fresh()
    expected = [names_of(whole, step) for step in range(1, 7)]
    found = [names_of(broken, step) for step in range(1, 4)]
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(broken.state_dict())))
    assert found + [names_of(resumed, step) for step in range(4, 7)] == expected
    assert resumed.state_dict() == whole.state_dict()


def test_what_is_due_is_known_from_the_first_prompt_that_a_resumed_run_draws():
    """Ahead of training prompts are drawn before a step begins."""
    curriculum, rollouts = curated([{"name": "no_positive_resampling"}])
    rollouts.take(7, 0)
    resumed, again = curated([{"name": "no_positive_resampling"}])
    again.load_state_dict(json.loads(json.dumps(rollouts.state_dict())))
    assert resumed.step == curriculum.step == 7


def test_memory_goes_through_a_checkpoint():
    nodes = [{"name": "no_positive_resampling"}]
    _, rollouts = curated(nodes)
    rollouts.take(1, 0)
    rollouts.take(2, 0)
    state = json.loads(json.dumps(rollouts.state_dict()))
    _, again = curated(nodes)
    again.load_state_dict(state)
    assert names_of(again, 3) == names_of(rollouts, 3)
    with pytest.raises(CheckpointError, match="lacks pass_rates, refilter"):
        again.load_state_dict({"source": {"at": 0}})
