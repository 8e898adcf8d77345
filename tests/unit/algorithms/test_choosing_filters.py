"""Filters that look at the whole group or remember prompts; shaping by length; copies."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from moerl.algorithms.duplicates import copies
from moerl.algorithms.filtering import build_filters
from moerl.algorithms.pass_rate import PassRate, PassRates
from moerl.algorithms.reward_shaping import build_shaping
from moerl.algorithms.shaping.length import relative_length_bonus
from moerl.errors import CheckpointError, ConfigError
from moerl.types import Prompt, RolloutGroup, Trajectory


def trajectory(reward=0.0, ids=(1, 2, 9), finish="stop"):
    tokens = np.array([7, *ids], dtype=np.int32)
    mask = np.array([False, *[True] * len(ids)])
    return Trajectory(
        token_ids=tokens,
        loss_mask=mask,
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        temperature=1.0,
        finish_reason=finish,
        version_spans=((1, len(tokens), 0),),
        reward=reward,
    )


def group(*trajectories):
    return RolloutGroup(Prompt("p", np.array([7], dtype=np.int32), None, "d"), tuple(trajectories))


def rewarded(*rewards):
    return group(*(trajectory(reward) for reward in rewards))


@pytest.mark.parametrize(
    ("rewards", "k", "kept"),
    [
        ((0.1, 0.9, 0.5), 1, [False, True, False]),
        ((0.1, 0.9, 0.5), 2, [False, True, True]),
        ((1.0, 1.0, 1.0), 2, [True, True, False]),
        ((float("nan"), 0.0), 2, [False, True]),
        ((0.1,), 5, [True]),
    ],
)
def test_the_best_of_a_group_are_kept(rewards, k, kept):
    filters = build_filters([{"name": "top_k", "k": k}])
    found, counted = filters.members(rewarded(*rewards))
    assert found.tolist() == kept
    assert counted.all()


def test_what_is_not_kept_may_leave_the_statistics():
    filters = build_filters([{"name": "top_k", "k": 1, "exclude_from_stats": True}, {"name": "zero_variance"}])
    kept, counted = filters.members(rewarded(0.0, 1.0))
    assert kept.tolist() == counted.tolist() == [False, True]
    assert filters.group(rewarded(0.0, 1.0)) == "zero_variance"


def test_copies_are_equal_but_for_their_stop_token():
    one, other = trajectory(ids=(1, 2, 9)), trajectory(ids=(1, 2, 8))
    cut = trajectory(ids=(1, 2), finish="length")
    assert copies(group(one, other, cut, trajectory(ids=(1, 3, 9)), one)).tolist() == [False, True, True, False, True]


def test_copies_are_masked_or_chosen_for_resampling():
    twice = group(trajectory(), trajectory(), trajectory(ids=(4,)))
    masking = build_filters([{"name": "duplicates", "mode": "mask"}])
    assert masking.members(twice)[0].tolist() == [True, False, True]
    assert masking.resampling == ()
    anew = build_filters([{"name": "duplicates", "mode": "resample", "rounds": 3}])
    assert anew.members(twice)[0].all()
    assert anew.anew(twice).tolist() == [False, True, False]
    assert anew.resampling_rounds == 3


def test_no_filter_keeps_everything():
    filters = build_filters([])
    assert all(values.all() for values in filters.members(rewarded(0.0, 1.0)))
    assert filters.prompt(PassRate(10, 10, 4, 4, 1), 5)
    assert not filters.anew(rewarded(0.0, 0.0)).any()


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [(PassRate(), True), (PassRate(10, 8, 4, 4, 1), True), (PassRate(10, 9, 4, 0, 1), False)],
)
def test_learned_prompts_are_retired_by_all_their_answers(rate, wanted):
    assert build_filters([{"name": "no_positive_resampling"}]).prompt(rate, 100) is wanted


@pytest.mark.parametrize(
    ("recent", "step", "wanted"),
    [(0, 10, False), (1, 10, True), (2, 10, True), (4, 10, False), (4, 52, False), (4, 53, True)],
)
def test_the_band_is_of_the_last_visit_and_expires(recent, step, wanted):
    filters = build_filters([{"name": "pass_rate_band", "low": 0.25, "high": 0.75, "every_steps": 50}])
    assert filters.prompt(PassRate(40, 0, 4, recent, 3), step) is wanted
    assert filters.prompt(PassRate(), step)


def test_pass_rates_add_up_and_go_through_a_checkpoint():
    rates = PassRates()
    rates.visit("a", 4, 3, 1)
    rates.visit("a", 2, 0, 7)
    rates.visit("b", 0, 0, 7)
    assert rates.of("a") == PassRate(6, 3, 2, 0, 7)
    assert rates.of("a").overall == 0.5
    assert rates.of("a").recent == 0.0
    assert rates.of("b").overall is rates.of("b").recent is None
    again = PassRates()
    again.load_state_dict(json.loads(json.dumps(rates.state_dict())))
    assert again == rates
    with pytest.raises(CheckpointError, match="damaged"):
        again.load_state_dict({"a": ["x"]})


def test_length_is_punished_in_proportion_or_within_the_group():
    answers = group(*(trajectory(reward, ids=range(n)) for n, reward in ((2, 1.0), (4, 0.0), (6, 1.0), (3, 0.0))))
    linear, _ = build_shaping([{"name": "length", "max_tokens": 10, "coefficient": 0.5}])([answers])
    np.testing.assert_allclose(linear, [-0.1, -0.2, -0.3, -0.15])
    relative, metrics = build_shaping([{"name": "length", "form": "group", "coefficient": 2.0}])([answers])
    np.testing.assert_allclose(relative, [1.0, 0.0, -1.0, 0.0])
    assert metrics["reward/shaping_length"].value() == pytest.approx(0.0)


def test_episodes_that_failed_are_no_measure_of_length():
    late = replace(trajectory(math.nan, ids=()), status="error", error="timeout")
    answers = group(late, trajectory(1.0, ids=range(100)), trajectory(1.0, ids=range(200)))
    relative, _ = build_shaping([{"name": "length", "form": "group"}])([answers])
    np.testing.assert_allclose(relative, [0.0, 0.05, -0.05])


def test_equal_lengths_are_not_shaped():
    assert relative_length_bonus(np.array([3.0, 3.0]), np.array([True, False])).tolist() == [0.0, 0.0]
    assert relative_length_bonus(np.zeros(0), np.zeros(0, dtype=bool)).tolist() == []


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"name": "top_k", "k": 0}, "filter.k is 0"),
        ({"name": "duplicates", "mode": "drop"}, "filter.mode is 'drop'"),
        ({"name": "duplicates", "rounds": 0}, "filter.rounds is 0"),
        ({"name": "no_positive_resampling", "threshold": 0.0}, "filter.threshold is 0"),
        ({"name": "pass_rate_band", "low": 0.9, "high": 0.1}, "filter.high is 0.1"),
        ({"name": "pass_rate_band", "every_steps": 0}, "filter.every_steps is 0"),
    ],
)
def test_wrong_arguments(node, words):
    with pytest.raises(ConfigError, match=words):
        build_filters([node])


def test_length_needs_a_budget_in_its_linear_form():
    with pytest.raises(ConfigError, match=r"rollout.max_new_tokens"):
        build_shaping([{"name": "length"}])
