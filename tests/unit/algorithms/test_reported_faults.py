"""Inputs on which public trainers went wrong, each as its kind: what a loss, a mask, a KL or a trajectory must do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracle_product import of_axes

import moerl
from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.filtering import build_filters
from moerl.algorithms.kl import importance_kl, kl_estimate, straight_through_kl
from moerl.algorithms.logprobs import token_logprobs
from moerl.algorithms.reward_shaping import build_shaping
from moerl.config.schema import AdvantageSection
from moerl.credit import CreditRules, credit
from moerl.types import Prompt, RolloutGroup, Trajectory

TOKEN_MEAN = {"name": "token_mean"}
SCORE = {"form": "score", "level": "none", "trust": {"name": "none"}, "aggregation": TOKEN_MEAN}
GSPO = {"level": "seq_geo", "trust": {"name": "clip", "lo": 0.5, "hi": 0.5}}


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def one_sequence(axes, **fields):
    """Loss, gradient and metrics of one answer."""
    found = of_axes(axes)(cu_seqlens=torch.tensor([0, len(fields["logprobs"])]), **fields)
    return float(found.loss.detach()), found.gradient, dict(found.metrics)


def test_short_answers_do_not_weigh_more():
    """100 tokens of loss 2.0 and 900 of 0.5 are 0.65, with the same gradient on each of them; not 1.25."""
    logprobs = torch.cat([torch.full((100,), -2.0), torch.full((900,), -0.5)]).double()
    found = of_axes(SCORE)(logprobs=logprobs, cu_seqlens=torch.tensor([0, 100, 1000]), advantages=f64(1.0, 1.0))
    assert float(found.loss.detach()) == pytest.approx(0.65)
    assert torch.equal(found.gradient, torch.full((1000,), -0.001, dtype=torch.float64))


@pytest.mark.parametrize("filler", [10.0, 1e30, -1e30, math.nan, math.inf])
def test_advantages_of_padding_do_not_enter_a_sequence_ratio(filler):
    zeros, mask = torch.zeros(4, dtype=torch.float64), torch.tensor([True, True, False, False])
    fields = {"logprobs": zeros, "old_logprobs": zeros, "mask": mask}
    plain = one_sequence(GSPO, **fields, advantages=f64(1, 1, 0, 0))
    spoilt = one_sequence(GSPO, **fields, advantages=f64(1, 1, filler, filler))
    assert plain[0] == spoilt[0] == -1.0
    assert torch.equal(plain[1], spoilt[1])
    assert plain[2] == spoilt[2]


@pytest.mark.parametrize("axes", [SCORE, GSPO, {"aggregation": TOKEN_MEAN}], ids=["score", "gspo", "clip"])
@pytest.mark.parametrize("old", [math.nan, math.inf, -math.inf, -200.0, -1e4])
def test_an_old_logprob_of_padding_reaches_nothing(axes, old):
    kl = {"kl": {"place": "loss", "estimator": "k3", "coefficient": 1.0}}
    fields = {"logprobs": f64(-1.0, 0.0), "mask": torch.tensor([True, False]), "advantages": f64(1.0)}
    plain = one_sequence({**axes, **kl}, **fields, old_logprobs=f64(-1, 0), ref_logprobs=f64(-2, 0))
    spoilt = one_sequence({**axes, **kl}, **fields, old_logprobs=f64(-1, old), ref_logprobs=f64(-2, old))
    assert plain[0] == spoilt[0]
    assert torch.equal(plain[1], spoilt[1])
    assert plain[2] == spoilt[2]


def test_three_of_five_tokens_rejected_leave_a_loss_divided_by_two():
    """Log-ratios (.1, -1.5, .8, -10, .3) in the band [.5, 2]: the loss is that of a batch of the two tokens."""
    c = f64(0.1, -1.5, 0.8, -10.0, 0.3)
    old = torch.full((5,), -12.0, dtype=torch.float64)
    node = {"name": "mis", "min": 0.5, "max": 2.0, "weight": "one", "rejected": "remove"}
    axes = {"aggregation": TOKEN_MEAN, "advantage": {"center": "none", "scale": "none"}}
    fields = {"logprobs": old, "old_logprobs": old, "rollout_logprobs": old - c, "rewards": f64(1.0)}
    loss, gradient, _ = one_sequence({**axes, "correction": node}, **fields)
    assert loss == pytest.approx(-1.0)
    assert gradient.tolist() == pytest.approx([-0.5, 0, 0, 0, -0.5])
    kept = {**node, "rejected": "keep_denominator"}
    assert one_sequence({**axes, "correction": kept}, **fields)[0] == pytest.approx(-0.4)


ESTIMATORS = {
    "k2": lambda p, r: kl_estimate("k2", p, r),
    "k3": lambda p, r: kl_estimate("k3", p, r),
    **{f"{k}, gradient of k2": lambda p, r, k=k: straight_through_kl(k, p, r) for k in ("k1", "k3")},
    **{f"{k}, importance": lambda p, r, k=k: importance_kl(k, p, r, p.detach()) for k in ("k1", "k2", "k3")},
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_on_the_kl_alone_never_raises_it(name):
    """Plain k1 in the loss, whose expected gradient is 0, is refused by the composition rules."""
    reference = torch.log_softmax(f64(1.0, -0.5, 0.3), 0)
    logits = f64(-0.2, 0.4, 0.1).requires_grad_()
    policy = torch.log_softmax(logits, 0)
    loss = (policy.detach().exp() * ESTIMATORS[name](policy, reference)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    after = torch.log_softmax(logits.detach() - 0.1 * gradient, 0)
    exact = [float((p.exp() * (p - reference)).sum()) for p in (policy.detach(), after)]
    assert exact[1] < exact[0]


# Trajectories


def trajectory(mask, reward, tag):
    mask = np.array(mask, dtype=bool)
    return Trajectory(
        token_ids=np.full(len(mask), tag, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
        temperature=1.0,
        finish_reason="stop",
        version_spans=(),
        reward=reward,
        reward_components={"task": reward},
    )


def group(index, *trajectories):
    prompt = Prompt(prompt_id=str(index), token_ids=np.array([1], dtype=np.int32), answer="", dataset="d")
    return RolloutGroup(prompt, tuple(trajectories))


def rules(**advantage):
    section, filters = AdvantageSection(**advantage), build_filters([])
    return CreditRules(
        advantages=lambda x: group_advantages(section, x),
        shaping=build_shaping([]),
        keeps=filters.sample,
        counts=filters.counts,
        reward_weights={"task": 1.0},
    )


RAW = {"center": "none", "scale": "none"}


def test_every_step_of_a_trajectory_has_the_advantage_on_its_own_tokens():
    """Two steps that are rows of their own, masks (0 0 1 1) and (1 1 0 0): not the last one's row for both."""
    steps = [trajectory(mask, 1.0, tag) for tag, mask in enumerate(((0, 0, 1, 1), (1, 1, 0, 0)))]
    samples, _ = credit([group(0, *steps)], rules(**RAW))
    assert [s.advantages.tolist() for s in samples] == [[0, 0, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("preset", ["grpo", "reinforce_pp", "ppo", "gspo_token", "gmpo"])
def test_every_turn_of_an_answer_is_credited_and_nothing_between_them(preset):
    """Turns of two and three tokens with a tool's two between: each turn's tokens have gradient, the tool's none."""
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    both = torch.cat([mask, mask])
    logprobs = torch.full((16,), -1.0, dtype=torch.float64)
    found = moerl.objective(preset)(
        logprobs=logprobs,
        old_logprobs=logprobs,
        ref_logprobs=logprobs,
        old_values=torch.zeros(16, dtype=torch.float64),
        mask=both,
        cu_seqlens=torch.tensor([0, 8, 16]),
        rewards=f64(1.0, 0.0),
        group_ids=torch.tensor([0, 0]),
    )
    assert (found.advantages[both] != 0).all()
    assert (found.gradient[both] != 0).all()
    assert (found.gradient[~both] == 0).all()
    first, second = found.gradient[both].split(5)
    assert (first < 0).all()
    assert (second > 0).all()


def test_what_a_filter_leaves_keeps_its_rows_over_two_rounds():
    """Three groups of two, of which only the last has spread; then a second round: every column is of the same row."""
    filters = build_filters([{"name": "zero_variance"}])
    rewards = [[(1.0, 1.0), (0.0, 0.0), (1.0, 0.0)], [(0.0, 1.0), (0.0, 0.0), (0.0, 3.0)]]
    accepted, tag = [], 0
    for number, rows in enumerate(rewards):
        for index, pair in enumerate(rows):
            made = group(10 * number + index, *(trajectory((0, 1), r, tag + k) for k, r in enumerate(pair)))
            tag += 2
            accepted += [made] if filters.group(made) is None else []
    samples, _ = credit(accepted, rules(center="group_mean", scale="none"))
    assert [int(s.token_ids[0]) for s in samples] == [4, 5, 6, 7, 10, 11]
    assert [s.reward for s in samples] == [1.0, 0.0, 0.0, 1.0, 0.0, 3.0]
    assert [s.prompt_id for s in samples] == ["2", "2", "10", "10", "12", "12"]
    assert [float(s.advantages[1]) for s in samples] == [0.5, -0.5, -0.5, 0.5, -1.5, 1.5]


# Positions and temperatures


def test_an_unchanged_policy_has_ratio_one_at_the_temperature_of_each_sample():
    """Logits (2, 0, -1) at 0.6, and at other temperatures in the same batch; at 1 the first ratio would be about 2."""
    logits, ids = f64(2, 0, -1).expand(4, 3), torch.tensor([0, 1, 2, 0])
    temperature = f64(0.6, 1.0, 0.25, 1.3)
    engine = torch.stack([torch.log_softmax(row / t, 0)[i] for row, t, i in zip(logits, temperature, ids, strict=True)])
    trained, _ = token_logprobs(logits, ids, temperature)
    torch.testing.assert_close((trained - engine).exp(), torch.ones(4, dtype=torch.float64))
    wrong, _ = token_logprobs(logits, ids, 1.0)
    assert float((engine - wrong).exp().sub(1).abs().max()) > 0.1


@pytest.mark.parametrize("width", [5, 6, 9])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count", [1, 2])
def test_exactly_the_completions_logprobs_are_selected(side, width, count):
    """Prompt of three, completion of two with logprobs -1 and -2; padded on either side, up to the full context."""
    row = [math.nan] * 3 + [-1.0, -2.0][:count]
    mask = [0, 0, 0] + [1] * count
    fill = width - len(row)
    before, after = (fill, 0) if side == "left" else (0, fill)
    logprobs = f64(*[math.nan] * before, *row, *[math.nan] * after).unsqueeze(0)
    chosen = torch.tensor([[0] * before + mask + [0] * after], dtype=torch.bool)
    found = of_axes(SCORE)(logprobs=logprobs, mask=chosen, advantages=f64(1.0))
    assert float(found.loss.detach()) == pytest.approx(sum((1.0, 2.0)[:count]) / count)
    assert torch.equal(found.gradient, torch.where(chosen, -1.0 / count, 0.0).double())


def test_the_mask_drops_a_token_whose_engine_logprob_is_absurd():
    """lp -1, rollout -100: dropped by the divergence mask without 0 * inf, whatever else is in the answer."""
    axes = {**SCORE, "level": "token", "anchor": "rollout", "trust": {"name": "div_mask"}}
    for dtype in (torch.float32, torch.float64):
        found = of_axes(axes)(
            logprobs=torch.tensor([-1.0, -1.0], dtype=dtype),
            rollout_logprobs=torch.tensor([-100.0, -1.0], dtype=dtype),
            cu_seqlens=torch.tensor([0, 2]),
            advantages=torch.tensor([1.0, 1.0], dtype=dtype),
        )
        assert found.gradient.tolist() == [0.0, -0.5]


def test_a_removed_row_leaves_the_advantages_of_the_others(batch_v):
    """Rewards 100 (rejected) and 1: scored in a group of itself, as in a batch from which the row was taken."""
    old = batch_v.old
    rollout = torch.cat([torch.full((4,), -9.0, dtype=torch.float64), old[4:]])
    axes = {
        "advantage": {"center": "group_mean", "scale": "none"},
        "correction": {"name": "icepop", "rejected": "remove"},
    }
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), batch_v.lengths.cumsum(0)])
    fields = {"old_logprobs": old, "logprobs": old, "rollout_logprobs": rollout}
    rewards, groups = f64(100, 1, 0.5, 0), batch_v.groups
    whole = of_axes(axes)(**fields, cu_seqlens=bounds, rewards=rewards, group_ids=groups)
    without = of_axes(axes)(
        **{name: values[4:] for name, values in fields.items()},
        cu_seqlens=bounds[1:] - 4,
        rewards=rewards[1:],
        group_ids=groups[1:],
    )
    assert torch.equal(whole.advantages[4:], without.advantages)
    assert whole.advantages[4:6].tolist() == [0.0, 0.0]
    torch.testing.assert_close(whole.gradient[4:], without.gradient)
