"""Sample and group filters, and what is added to rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moerl.algorithms.filters import build_filters
from moerl.algorithms.shaping import build_shaping
from moerl.errors import ConfigError
from moerl.metrics import to_floats
from moerl.types import FinishReason, Prompt, RolloutGroup, Trajectory


def trajectory(reward=0.0, response=(5, 6), finish: FinishReason = "stop", prompt_tokens=2):
    s = prompt_tokens + len(response)
    return Trajectory(
        token_ids=np.array([1] * prompt_tokens + list(response), dtype=np.int32),
        loss_mask=np.arange(s) >= prompt_tokens,
        rollout_logprobs=np.zeros(s, dtype=np.float32),
        temperature=1.0,
        finish_reason=finish,
        version_spans=((prompt_tokens, s, 0),),
        reward=reward,
    )


def group(*trajectories):
    return RolloutGroup(Prompt("set/0", np.array([1, 1], dtype=np.int32), "1", "set"), tuple(trajectories))


def rewards(*values):
    return group(*(trajectory(value) for value in values))


ZERO_VARIANCE = [{"name": "zero_variance"}]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((0.0, 1.0), None),
        ((0.0, 0.0), "zero_variance"),
        ((1 / 3, 1 / 3, 1 / 3), "zero_variance"),
        ((1.0,), "zero_variance"),
        ((math.nan, 1.0, 1.0), "zero_variance"),
        ((math.nan, 1.0, 0.0), None),
        ((math.nan, math.nan), "unscored"),
    ],
)
def test_zero_variance(values, reason):
    assert build_filters(ZERO_VARIANCE).group(rewards(*values)) == reason


def test_zero_variance_looks_at_the_task_reward_whatever_the_length():
    """Two wrong answers of 10 and 5000 tokens: the overlong punishment differs, the decision does not."""
    short, long = trajectory(0.0, range(10)), trajectory(0.0, range(5000), "length")
    shape = build_shaping([{"name": "overlong", "max_tokens": 5000}])
    assert shape([group(short, long)])[0].tolist() == [0.0, -1.0]
    assert build_filters(ZERO_VARIANCE).group(group(short, long)) == "zero_variance"


def test_overlong_masks_and_may_leave_the_statistics():
    stopped, cut = trajectory(1.0), trajectory(0.0, finish="length")
    plain = build_filters([{"name": "overlong"}])
    assert (plain.sample(stopped), plain.sample(cut)) == (True, False)
    assert plain.counts(cut)
    excluding = build_filters([{"name": "overlong", "exclude_from_stats": True}])
    assert not excluding.sample(cut)
    assert not excluding.counts(cut)
    assert excluding.counts(stopped)


def test_overlong_needs_to_know_why_an_answer_ended():
    with pytest.raises(ConfigError, match=r"reads every trajectory's finish_reason, but one has '.*'; let"):
        build_filters([{"name": "overlong"}]).sample(trajectory(1.0, finish=""))


def test_what_is_out_of_the_statistics_is_out_of_the_zero_variance_decision_too():
    mixed = group(trajectory(1.0), trajectory(1.0), trajectory(0.0, finish="length"))
    assert build_filters([{"name": "overlong"}, *ZERO_VARIANCE]).group(mixed) is None
    excluding = build_filters([{"name": "overlong", "exclude_from_stats": True}, *ZERO_VARIANCE])
    assert excluding.group(mixed) == "zero_variance"


def test_positives_only():
    filters = build_filters([{"name": "positives_only"}])
    assert [filters.sample(trajectory(reward)) for reward in (1.0, 0.0, -1.0, math.nan)] == [True, False, False, False]


def test_no_filters_accept_everything():
    filters = build_filters([])
    assert filters.group(rewards(0.0, 0.0)) is None
    assert filters.sample(trajectory(finish="length"))
    assert filters.counts(trajectory())


def test_filters_say_what_is_wrong_with_their_nodes():
    with pytest.raises(ConfigError, match=r"algorithm\.filters\[1\].*unknown key 'exclude_stats'.*exclude_from_stats"):
        build_filters([*ZERO_VARIANCE, {"name": "overlong", "exclude_stats": True}])
    with pytest.raises(ConfigError, match="did you mean 'zero_variance'"):
        build_filters([{"name": "zero_varianse"}])
    with pytest.raises(ConfigError, match="second 'zero_variance'"):
        build_filters(ZERO_VARIANCE * 2)


@pytest.mark.parametrize(
    ("form", "penalties"),
    [("soft", [0, -0.25, -0.75, -1, -1]), ("linear_unbounded", [0, -0.25, -0.75, -1, -1.25])],
)
def test_overlong_vector(form, penalties):
    node = {"name": "overlong", "max_tokens": 16, "buffer_fraction": 0.25, "form": form}
    lengths = (12, 13, 15, 16, 17)
    shaped, metrics = build_shaping([node])([group(*(trajectory(response=range(n)) for n in lengths))])
    assert shaped.tolist() == pytest.approx(penalties)
    assert to_floats(metrics) == pytest.approx({"reward/shaping_overlong": sum(penalties) / 5})


@pytest.mark.parametrize(
    ("ids", "n", "penalty"),
    [((5, 5, 5, 5, 5), 2, -0.75), ((1, 2, 3, 1, 2, 3, 1), 3, -0.4), ((1, 2), 3, 0.0), ((), 1, 0.0)],
)
def test_repetition_vector(ids, n, penalty):
    shaped, _ = build_shaping([{"name": "repetition", "n": n}])([group(trajectory(response=ids))])
    assert shaped.tolist() == pytest.approx([penalty])


def test_duplicates_punish_copies_within_a_group_only():
    a, b = trajectory(response=(5, 6, 9)), trajectory(response=(5, 7, 9))
    other_stop_token, cut = trajectory(response=(5, 6, 8)), trajectory(response=(5, 6), finish="length")
    shape = build_shaping([{"name": "duplicates", "penalty": -0.5}])
    shaped, _ = shape([group(a, b, a, other_stop_token, cut), group(a)])
    assert shaped.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5, 0.0]


def test_an_answer_without_a_verdict_is_no_first_of_its_copies():
    """It is no sample: its twin trains, loses nothing, and the mean speaks of samples alone."""
    unscored, twin, copy = trajectory(math.nan), trajectory(1.0), trajectory(0.0)
    shaped, metrics = build_shaping([{"name": "duplicates", "penalty": -0.5}])([group(unscored, twin, copy, unscored)])
    assert shaped.tolist() == [0.0, 0.0, -0.5, 0.0]
    assert to_floats(metrics) == {"reward/shaping_duplicates": -0.25}
    kept, _ = build_filters([{"name": "duplicates"}]).members(group(unscored, twin, copy, unscored))
    assert kept.tolist() == [True, True, False, True]


def test_terms_add_up_and_none_is_zero():
    nodes = [{"name": "overlong", "max_tokens": 4, "buffer_fraction": 0.5}, {"name": "repetition", "n": 1}]
    shaped, metrics = build_shaping(nodes)([group(trajectory(response=(5, 5, 5, 5)))])
    assert shaped.tolist() == pytest.approx([-1.75])
    assert set(metrics) == {"reward/shaping_overlong", "reward/shaping_repetition"}
    assert build_shaping([])([group(trajectory()), group(trajectory())])[0].tolist() == [0.0, 0.0]
    assert build_shaping(nodes)([])[0].shape == (0,)


def test_shaping_says_what_is_wrong_with_its_nodes():
    with pytest.raises(ConfigError, match=r"max_tokens is 0.*rollout\.max_new_tokens"):
        build_shaping([{"name": "overlong"}])
    with pytest.raises(ConfigError, match=r"buffer_fraction is 1\.5"):
        build_shaping([{"name": "overlong", "max_tokens": 8, "buffer_fraction": 1.5}])
    with pytest.raises(ConfigError, match="2 terms 'repetition'"):
        build_shaping([{"name": "repetition"}, {"name": "repetition"}])
