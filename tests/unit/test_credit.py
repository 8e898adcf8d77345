"""credit: which trajectories become samples, and that every column of a sample is of the same trajectory."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.filtering import build_filters
from moerl.algorithms.reward_shaping import build_shaping
from moerl.config.schema import AdvantageSection
from moerl.credit import CreditRules, credit
from moerl.metrics import to_floats
from moerl.types import Prompt, RolloutGroup, Trajectory

NAN = math.nan


def trajectory(reward=0.0, *, tag=0, length=3, status="ok", finish="stop", components=None):
    """Two prompt tokens and `length` sampled ones; every array says `tag`."""
    mask = np.array([False, False] + [True] * length)
    return Trajectory(
        token_ids=np.full(2 + length, tag, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-tag), np.float32(0.0)),
        temperature=1.0 + tag,
        finish_reason=finish,
        version_spans=((2, 2 + length, 0),),
        status=status,
        reward=reward,
        reward_components={"task": reward} if components is None else components,
    )


def group(index, *trajectories):
    prompt = Prompt(prompt_id=f"set/{index}", token_ids=np.array([1, 2], dtype=np.int32), answer="1", dataset="set")
    return RolloutGroup(prompt, tuple(trajectories))


def rules(*, filters=(), shaping=(), weights=None, **advantage):
    section, built = AdvantageSection(**advantage), build_filters(list(filters))
    return CreditRules(
        advantages=lambda x: group_advantages(section, x),
        shaping=build_shaping(list(shaping)),
        keeps=built.sample,
        counts=built.counts,
        reward_weights=weights or {"task": 1.0},
    )


def advantages_of(samples):
    """One number per sample; it must be the same on every token of the mask and 0 elsewhere."""
    numbers = []
    for sample in samples:
        inside = sample.advantages[sample.loss_mask]
        assert not sample.advantages[~sample.loss_mask].any()
        assert len(set(inside.tolist())) <= 1
        numbers.append(float(inside[0]) if len(inside) else 0.0)
    return numbers


def test_samples_stand_in_group_order_with_the_advantage_of_their_group():
    groups = [group(0, trajectory(1.0), trajectory(0.0)), group(1, trajectory(5.0), trajectory(1.0), trajectory(3.0))]
    samples, _ = credit(groups, rules(scale="none"))
    assert [s.sample_id for s in samples] == [0, 1, 2, 3, 4]
    assert [s.group_id for s in samples] == [0, 0, 1, 1, 1]
    assert [s.prompt_id for s in samples] == ["set/0", "set/0", "set/1", "set/1", "set/1"]
    assert advantages_of(samples) == [0.5, -0.5, 2.0, -2.0, 0.0]
    assert [s.reward for s in samples] == [1.0, 0.0, 5.0, 1.0, 3.0]


@pytest.mark.parametrize(
    "absent",
    [
        trajectory(NAN, tag=9, status="error"),
        trajectory(100.0, tag=9, status="error"),
        trajectory(0.0, tag=9, status="too_long"),
        trajectory(1.0, tag=9, status="aborted"),
        trajectory(NAN, tag=9),
        trajectory(math.inf, tag=9),
    ],
    ids=["error", "error with a number", "too long", "aborted", "unscored", "infinite"],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_trajectory_without_a_verdict_changes_nothing_for_the_others(absent, place):
    whole = [trajectory(1.0, tag=1), trajectory(0.0, tag=2), trajectory(0.0, tag=3)]
    with_it = [*whole[:place], absent, *whole[place:]]
    other = group(1, trajectory(1.0, tag=4), trajectory(0.0, tag=5))
    expected, expected_metrics = credit([group(0, *whole), other], rules())
    samples, metrics = credit([group(0, *with_it), other], rules())
    assert [s.token_ids[0] for s in samples] == [1, 2, 3, 4, 5]
    assert advantages_of(samples) == advantages_of(expected)
    assert to_floats(metrics) == to_floats(expected_metrics)


@pytest.mark.parametrize("rewards", [[1.0] + [NAN] * 7, [1.0, 0.0, NAN, NAN]])
def test_unscored_rewards_never_poison_their_group(rewards):
    samples, _ = credit([group(0, *[trajectory(r, tag=i) for i, r in enumerate(rewards)])], rules())
    scored = [r for r in rewards if math.isfinite(r)]
    assert len(samples) == len(scored)
    assert all(math.isfinite(a) for a in advantages_of(samples))
    if len(scored) == 1:
        assert advantages_of(samples) == [0.0]
    else:
        assert advantages_of(samples) == pytest.approx([1.0, -1.0], abs=1e-5)


def test_every_column_of_a_sample_is_of_one_trajectory():
    generator = random.Random(5)
    for _ in range(30):
        tag, groups = 0, []
        for index in range(generator.randint(1, 5)):
            members = []
            for _ in range(generator.randint(1, 6)):
                tag += 1
                status = generator.choice(["ok", "ok", "ok", "error", "too_long"])
                reward = NAN if status != "ok" or generator.random() < 0.2 else float(tag)
                members.append(trajectory(reward, tag=tag, length=generator.randint(1, 4), status=status))
            groups.append(group(index, *members))
        samples, _ = credit(groups, rules(center="none", scale="none"))
        alive = {
            t.token_ids[0]: (g, t) for g, one in enumerate(groups) for t in one.trajectories if t.reward == t.reward
        }
        assert [s.token_ids[0] for s in samples] == sorted(alive)
        for sample in samples:
            where, source = alive[sample.token_ids[0]]
            assert sample.group_id == where
            assert sample.prompt_id == f"set/{where}"
            assert sample.reward == sample.token_ids[0] == source.reward
            assert sample.temperature == 1.0 + sample.token_ids[0]
            assert sample.rollout_logprobs[-1] == -sample.token_ids[0]
            assert advantages_of([sample]) == [float(sample.token_ids[0])]


def test_a_filtered_sample_keeps_its_weight_in_the_statistics_unless_it_is_told_not_to():
    cut = trajectory(0.0, tag=3, finish="length")
    groups = [group(0, trajectory(1.0, tag=1), trajectory(0.0, tag=2), cut)]
    kept, metrics = credit(groups, rules(filters=[{"name": "overlong"}], scale="none"))
    assert advantages_of(kept) == pytest.approx([2 / 3, -1 / 3, 0.0])
    assert not kept[2].loss_mask.any()
    assert to_floats(metrics)["advantage/masked_samples"] == 1.0
    out, _ = credit(groups, rules(filters=[{"name": "overlong", "exclude_from_stats": True}], scale="none"))
    assert advantages_of(out) == [0.5, -0.5, 0.0]
    assert not out[2].loss_mask.any()


def test_shaping_stays_with_its_trajectory_when_an_earlier_one_failed():
    shaping = [{"name": "overlong", "max_tokens": 10, "buffer_fraction": 0.5}]
    groups = [
        group(0, trajectory(NAN, length=10, status="error"), trajectory(1.0, length=10), trajectory(1.0, length=5)),
        group(1, trajectory(0.0, length=5), trajectory(NAN, length=10), trajectory(0.0, length=10)),
    ]
    samples, _ = credit(groups, rules(shaping=shaping, scale="none"))
    assert [s.reward for s in samples] == [0.0, 1.0, 0.0, -1.0]
    assert advantages_of(samples) == [-0.5, 0.5, 0.5, -0.5]


def test_the_dynamic_filter_looks_at_the_task_reward_and_not_at_the_shaped_one():
    built = build_filters([{"name": "zero_variance"}])
    wrong = group(0, trajectory(0.0, length=10), trajectory(0.0, length=5000))
    shaped, _ = build_shaping([{"name": "overlong", "max_tokens": 5000}])([wrong])
    assert shaped[0] != shaped[1]
    assert built.group(wrong) is not None
    assert built.group(group(0, trajectory(0.0), trajectory(1.0))) is None


def test_components_are_weighed_and_one_that_does_not_apply_counts_nothing():
    weights = {"task": 1.0, "format": 0.5}
    rows = [
        trajectory(1.5, components={"task": 1.0, "format": 1.0}),
        trajectory(1.0, components={"task": 1.0}),
        trajectory(0.0, components={"task": 0.0, "format": 0.0}),
    ]
    samples, _ = credit([group(0, *rows)], rules(weights=weights, center="none", scale="none"))
    assert advantages_of(samples) == [1.5, 1.0, 0.0]


@pytest.mark.parametrize("groups", [[], [group(0, trajectory(NAN, status="error"), trajectory(NAN))]])
def test_nothing_scored_is_no_sample_and_no_error(groups):
    samples, metrics = credit(groups, rules(shaping=[{"name": "overlong", "max_tokens": 10}]))
    assert samples == []
    assert all(math.isfinite(value) for value in to_floats(metrics).values())


def test_the_order_of_the_groups_does_not_matter():
    first = group(0, trajectory(1.0, tag=1), trajectory(0.0, tag=2), trajectory(0.25, tag=3))
    second = group(1, trajectory(3.0, tag=4), trajectory(1.0, tag=5))
    one, _ = credit([first, second], rules())
    other, _ = credit([second, first], rules())
    by_tag = {s.token_ids[0]: a for s, a in zip(one, advantages_of(one), strict=True)}
    assert by_tag == {s.token_ids[0]: a for s, a in zip(other, advantages_of(other), strict=True)}


def test_samples_carry_what_the_rollout_recorded():
    one = dataclasses.replace(trajectory(1.0), has_route=np.array([True, True, True, True, False]))
    samples, _ = credit([group(0, one, trajectory(0.0))], rules())
    assert samples[0].has_route is one.has_route
    assert samples[1].routed_experts is None


@pytest.mark.parametrize("cut", [0, 1], ids=["the better one is masked", "the worse one is masked"])
def test_half_a_pair_does_not_train(cut):
    """A filter masked one answer of the pair: the other has nothing to be compared with; other groups go on."""
    pair = [trajectory(1.0, tag=1), trajectory(0.0, tag=2), trajectory(0.5, tag=3)]
    pair[cut] = dataclasses.replace(pair[cut], finish_reason="length")
    groups = [group(0, *pair), group(1, trajectory(0.0, tag=4), trajectory(1.0, tag=5))]
    pairs = dataclasses.replace(
        rules(filters=[{"name": "overlong"}], center="none", scale="none", transform={"name": "best_worst"}),
        trains_on_zero=False,
    )
    samples, metrics = credit(groups, pairs)
    assert [bool(s.loss_mask.any()) for s in samples] == [False, False, False, True, True]
    assert to_floats(metrics)["advantage/masked_samples"] == 3.0
