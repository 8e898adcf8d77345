"""Laws that hold for every preset: masks, partitions, on-policy identity, extremes, detachment."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moerl.algorithms.presets import PRESETS
from moerl.algorithms.types import LossInputs
from moerl.metrics import merge_into, to_floats
from moerl.types import TokenWeights

NAMES = sorted(PRESETS)
OPTIONAL = ("old_logprobs", "ref_logprobs", "router_shift", "topk_logprobs", "rollout_topk")
OWN_GRADIENT = {"ar_lopti", "dr_grpo_ref_weighted", "group_dpo", "vapo"}
"""By design not the policy gradient where all policies are equal: token weights, pairs, a likelihood term."""
PAIRS = {"group_dpo"}


def run(batch_v, name, x):
    loss, metrics = batch_v.objective(PRESETS[name].values)(x)
    return loss, metrics


def built(batch_v, name, logprobs, **changed) -> LossInputs:
    aggregation = batch_v.resolved(PRESETS[name].values["aggregation"])
    return batch_v.inputs(logprobs, aggregation=aggregation, **changed)


def with_masked_tokens(x: LossInputs, garbage: float) -> tuple[LossInputs, torch.Tensor]:
    """One masked token of nothing but `garbage` after every live one; returns the rows of the live ones too."""
    live = torch.arange(len(x.mask)) * 2

    def spread(values: torch.Tensor, fill: Any) -> torch.Tensor:
        return torch.stack([values, torch.full_like(values, fill)], 1).flatten(0, 1)

    spread_inputs = dataclasses.replace(
        x,
        logprobs=spread(x.logprobs, garbage),
        rollout_logprobs=spread(x.rollout_logprobs, garbage),
        advantages=spread(x.advantages, garbage),
        mask=spread(x.mask, False),
        weights=TokenWeights.shared(spread(x.weights.policy, garbage)),
        seq_ids=x.seq_ids.repeat_interleave(2),
        optional={**x.optional, **{key: spread(x.optional[key], garbage) for key in OPTIONAL}},
    )
    return spread_inputs, live


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e4])
@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_change_nothing(batch_v, name, garbage):
    loss, gradient, metrics = batch_v.run(PRESETS[name].values)
    x, live = with_masked_tokens(built(batch_v, name, batch_v.now), garbage)
    leaf = x.logprobs.detach().clone().requires_grad_()
    masked_loss, masked_metrics = run(batch_v, name, dataclasses.replace(x, logprobs=leaf))
    (masked_gradient,) = torch.autograd.grad(masked_loss, leaf)
    torch.testing.assert_close(masked_loss.detach(), loss, rtol=0, atol=1e-15)
    torch.testing.assert_close(masked_gradient[live], gradient, rtol=0, atol=1e-15)
    assert (masked_gradient[live + 1] == 0).all()
    assert to_floats(masked_metrics) == pytest.approx(metrics, abs=1e-12)


PARTITIONS = {
    "2 + 2": [slice(0, 2), slice(2, 4)],
    "1 + 3": [slice(0, 1), slice(1, 4)],
    "singles": [slice(i, i + 1) for i in range(4)],
}


@pytest.mark.parametrize("parts", PARTITIONS.values(), ids=PARTITIONS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_whole(batch_v, name, parts):
    if name in PAIRS and parts != PARTITIONS["2 + 2"]:
        pytest.skip("a pair stays in one micro-batch")
    loss, gradient, metrics = batch_v.run(PRESETS[name].values)
    leaf = batch_v.now.clone().requires_grad_()
    merged: dict = {}
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        part, part_metrics = run(batch_v, name, built(batch_v, name, leaf, rows=rows))
        part.backward()
        total += part.detach()
        merge_into(merged, part_metrics)
    torch.testing.assert_close(total, loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-15)
    assert to_floats(merged) == pytest.approx(metrics, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_GRADIENT])
def test_equal_policies_give_the_reinforce_gradient_exactly(batch_v, name):
    same = batch_v.now
    policies = dict.fromkeys(("old_logprobs", "rollout_logprobs", "ref_logprobs"), same)
    topk = dict.fromkeys(("topk_logprobs", "rollout_topk"), batch_v.with_another_token(same))
    x = built(batch_v, name, same, router_shift=torch.ones(10), **policies, **topk)
    leaf = same.clone().requires_grad_()
    loss, metrics = run(batch_v, name, dataclasses.replace(x, logprobs=leaf))
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(gradient, -x.weights.policy * x.advantages, rtol=0, atol=1e-16)
    values = to_floats(metrics)
    assert values["pg/ratio_mean"] == values["pg/ratio_max"] == 1.0
    assert all(values[key] == 0 for key in values if key.startswith(("pg/clip", "pg/clamped", "pg/dual", "mm/reject")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios_stay_finite(batch_v, name, dtype):
    for shift in (-1e30, -1e4, -200.0, -20.0, 20.0, 100.0, 200.0, 1e4):
        leaf = (batch_v.now + shift).to(dtype).requires_grad_()
        loss, _ = run(batch_v, name, built(batch_v, name, leaf, dtype=dtype))
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        away = built(batch_v, name, batch_v.now.to(dtype), dtype=dtype, rollout_logprobs=batch_v.rollout + shift)
        loss, metrics = run(batch_v, name, away)
        assert loss.isfinite()
        assert all(math.isfinite(value) for value in to_floats(metrics).values())


@pytest.mark.parametrize("name", NAMES)
def test_only_the_logprobs_receive_gradient(batch_v, name):
    x = built(batch_v, name, batch_v.now.clone().requires_grad_())
    others = {
        "advantages": x.advantages.clone().requires_grad_(),
        "rollout_logprobs": x.rollout_logprobs.clone().requires_grad_(),
    }
    optional = {key: x.optional[key].clone().requires_grad_() for key in OPTIONAL}
    loss, metrics = run(batch_v, name, dataclasses.replace(x, optional={**x.optional, **optional}, **others))
    gradients = torch.autograd.grad(loss, [*others.values(), *optional.values()], allow_unused=True)
    assert all(gradient is None for gradient in gradients)
    assert not any(
        getattr(part, "requires_grad", False) for metric in metrics.values() for part in dataclasses.astuple(metric)
    )


@pytest.mark.parametrize("name", NAMES)
def test_order_of_sequences_does_not_matter(batch_v, name):
    loss, gradient, _ = batch_v.run(PRESETS[name].values)
    x = built(batch_v, name, batch_v.now)
    order = torch.cat([(x.seq_ids == i).nonzero().squeeze(1) for i in (2, 0, 3, 1)])
    leaf = batch_v.now[order].clone().requires_grad_()
    moved = dataclasses.replace(
        x,
        logprobs=leaf,
        rollout_logprobs=x.rollout_logprobs[order],
        advantages=x.advantages[order],
        weights=TokenWeights.shared(x.weights.policy[order]),
        seq_ids=torch.repeat_interleave(torch.arange(4), torch.tensor([3, 4, 1, 2])),
        optional={
            **{key: x.optional[key][order] for key in OPTIONAL},
            "group_ids": x.group_ids[torch.tensor([2, 0, 3, 1])],
        },
    )
    moved_loss, _ = run(batch_v, name, moved)
    (moved_gradient,) = torch.autograd.grad(moved_loss, leaf)
    torch.testing.assert_close(moved_loss.detach(), loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(moved_gradient, gradient[order], rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_live_still_runs_backward(batch_v, name):
    leaf = torch.full((10,), math.nan, dtype=torch.float64, requires_grad=True)
    x = dataclasses.replace(built(batch_v, name, leaf), mask=torch.zeros(10, dtype=torch.bool))
    loss, metrics = run(batch_v, name, x)
    loss.backward()
    assert loss.item() == 0
    assert (leaf.grad == 0).all()
    values = to_floats(metrics)
    assert "pg/ratio_mean" not in values
    assert "pg/ratio_max" not in values


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_at_all(batch_v, name):
    x = built(batch_v, name, batch_v.now)
    empty = torch.zeros(0, dtype=torch.float64)
    leaf = empty.clone().requires_grad_()
    nothing = dataclasses.replace(
        x,
        logprobs=leaf,
        rollout_logprobs=empty,
        advantages=empty,
        mask=empty.bool(),
        weights=TokenWeights.shared(empty),
        seq_ids=empty.long(),
        num_seqs=0,
        optional={key: x.optional[key][:0] for key in (*OPTIONAL, "group_ids")},
    )
    loss, _ = run(batch_v, name, nothing)
    loss.backward()
    assert loss.item() == 0


READS_ROLLOUT = [
    name for name in NAMES if PRESETS[name].values.get("anchor") == "rollout" or "correction" in PRESETS[name].values
]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("name", READS_ROLLOUT)
def test_a_token_without_a_rollout_logprob_leaves_the_policy_term(batch_v, name, bad):
    rollout = batch_v.rollout.clone()
    rollout[2] = bad
    loss, gradient, metrics = batch_v.run(PRESETS[name].values, rollout_logprobs=rollout)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert metrics["mm/invalid_logprobs"] == 1
    kl_gradient = 0.0
    if "kl" in PRESETS[name].values:
        zero = torch.zeros(10, dtype=torch.float64)
        kl_gradient = float(batch_v.run(PRESETS[name].values, advantages=zero)[1][2])
    assert float(gradient[2]) == pytest.approx(kl_gradient, abs=1e-15)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in READS_ROLLOUT])
def test_a_rollout_logprob_that_nobody_reads_is_of_no_consequence(batch_v, name):
    broken = torch.full((10,), math.nan, dtype=torch.float64)
    loss, gradient, metrics = batch_v.run(PRESETS[name].values, rollout_logprobs=broken)
    wanted_loss, wanted_gradient, _ = batch_v.run(PRESETS[name].values)
    assert torch.equal(loss, wanted_loss)
    assert torch.equal(gradient, wanted_gradient)
    assert "mm/invalid_logprobs" not in metrics


@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_logprob_is_counted_and_dropped_and_a_nan_reaches_the_loss(batch_v, name):
    logprobs = batch_v.now.clone()
    logprobs[6] = -math.inf
    loss, gradient, metrics = batch_v.run(PRESETS[name].values, logprobs)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[6] == 0
    assert metrics["pg/invalid_logprobs"] == 1
    logprobs[6] = math.nan
    assert batch_v.run(PRESETS[name].values, logprobs)[0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_widened(batch_v, dtype):
    leaf = batch_v.now.to(dtype).requires_grad_()
    loss, _ = run(batch_v, "gspo", built(batch_v, "gspo", leaf, dtype=torch.float32))
    assert loss.dtype == torch.float32
    loss.backward()
    assert leaf.grad.isfinite().all()


def gradient_of(batch_v, values, **changed):
    return batch_v.run(values, **changed)[1]


TOKEN_MEAN = {"name": "token_mean"}
UNCLIPPED = {"trust": {"name": "none"}, "aggregation": TOKEN_MEAN}
CLIPPED = {"trust": {"name": "clip"}, "aggregation": TOKEN_MEAN}


def test_score_and_ratio_forms_agree_where_nothing_binds(batch_v):
    wanted = gradient_of(batch_v, UNCLIPPED)
    for trust in ({"name": "none"}, {"name": "is_clip", "max": 1e9}):
        score = gradient_of(batch_v, {"form": "score", "trust": trust, "aggregation": TOKEN_MEAN})
        torch.testing.assert_close(score, wanted, rtol=1e-14, atol=0)


def test_limits_reduce_to_the_base_method(batch_v):
    base = gradient_of(batch_v, CLIPPED)
    for bound in ({"delta": 1e9}, {"dual_c": 1e9}):
        assert torch.equal(gradient_of(batch_v, {**CLIPPED, "trust": {"name": "clip", **bound}}), base)
    shift = {"enabled": True, "gamma_min": 0.8}
    ones = torch.ones(10, dtype=torch.float64)
    assert torch.equal(gradient_of(batch_v, {**CLIPPED, "router_shift": shift}, router_shift=ones), base)
    floored = gradient_of(batch_v, {**CLIPPED, "router_shift": {**shift, "gamma_min": 1.0}})
    assert torch.equal(floored, base)
    wide = {"name": "tis", "cap": 1e9}
    same = batch_v.run({**CLIPPED, "correction": wide}, rollout_logprobs=batch_v.old)[1]
    assert torch.equal(same, base)
    soft = {"name": "soft_gate", "tau_pos": 1e-6, "tau_neg": 1e-6}
    gated = gradient_of(batch_v, {"trust": soft, "aggregation": TOKEN_MEAN})
    torch.testing.assert_close(gated, gradient_of(batch_v, UNCLIPPED), rtol=1e-5, atol=0)


def test_router_shift_is_floored_and_never_enlarges(batch_v):
    shift = {"router_shift": {"enabled": True, "gamma_min": 0.8}}
    below = torch.full((10,), 0.1, dtype=torch.float64)
    at = torch.full((10,), 0.8, dtype=torch.float64)
    assert torch.equal(
        gradient_of(batch_v, {**UNCLIPPED, **shift}, router_shift=below),
        gradient_of(batch_v, {**UNCLIPPED, **shift}, router_shift=at),
    )
    torch.testing.assert_close(
        gradient_of(batch_v, {**UNCLIPPED, **shift}, router_shift=at), 0.8 * gradient_of(batch_v, UNCLIPPED)
    )


def test_gspo_ratio_is_the_masked_mean_and_not_per_token(batch_v):
    """Log-ratios 0.4 and -0.4 of one sequence: the ratio is 1 on both tokens and nothing is clipped."""
    x = dataclasses.replace(
        batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN, rows=slice(1, 2)),
        optional={"old_logprobs": torch.tensor([-1.0, -1.0], dtype=torch.float64)},
    )
    leaf = torch.tensor([-0.6, -1.4], dtype=torch.float64, requires_grad=True)
    loss, metrics = run(batch_v, "gspo", dataclasses.replace(x, logprobs=leaf))
    values = to_floats(metrics)
    assert values["pg/ratio_max"] == pytest.approx(1.0)
    assert values["pg/clip_low"] == values["pg/clip_high"] == 0
    loss.backward()
    torch.testing.assert_close(leaf.grad, -x.weights.policy * x.advantages)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("mean_log_ratio", [-200.0, -50.0, -1.0, 1.0, 50.0, 100.0, 200.0])
def test_gspo_far_away(batch_v, advantage, mean_log_ratio):
    x = dataclasses.replace(
        batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN),
        advantages=torch.full((10,), advantage, dtype=torch.float64),
    )
    leaf = (batch_v.old + mean_log_ratio).requires_grad_()
    loss, metrics = run(batch_v, "gspo", dataclasses.replace(x, logprobs=leaf))
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()
    assert to_floats(metrics)["pg/clamped"] == float(abs(mean_log_ratio) > 20)


def test_a_mask_made_inside_the_loss_drops_without_a_nan(batch_v):
    """lp = -1, rollout = -100 on a token that the divergence mask drops."""
    rollout = batch_v.rollout.clone()
    rollout[0] = -100.0
    logprobs = batch_v.now.clone()
    logprobs[0] = -1.0
    loss, gradient, _ = batch_v.run(PRESETS["dppo_tv"].values, logprobs, rollout_logprobs=rollout)
    assert loss.isfinite()
    assert gradient[0] == 0


def test_batch_normalised_weights_use_the_mean_of_the_minibatch(batch_v):
    values = {**CLIPPED, "correction": {"name": "tis", "cap": 2.0, "batch_normalize": True}}
    objective = batch_v.objective(values)
    assert objective.needs_constants == {"correction_mean"}
    mean = float((batch_v.old - batch_v.rollout).exp().clamp(max=2).mean())
    x = dataclasses.replace(batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN), constants={"correction_mean": mean})
    plain, _, _ = batch_v.run({**CLIPPED, "correction": {"name": "tis", "cap": 2.0}})
    assert float(objective(x)[0]) == pytest.approx(float(plain) / mean, rel=1e-12)


def test_vespo_takes_token_weights_inside_its_sequence_ratio(batch_v):
    """With uncapped token weights the ratio to the old policy becomes that to the rollout policy."""
    base = {"form": "score", "level": "seq_prod", "trust": {"name": "gamma_kernel"}, "aggregation": TOKEN_MEAN}
    inside = gradient_of(batch_v, {**base, "correction": {"name": "tis", "cap": 1e9}})
    torch.testing.assert_close(inside, gradient_of(batch_v, {**base, "anchor": "rollout"}), rtol=1e-12, atol=0)


def test_entropy_term(batch_v):
    values = {**CLIPPED, "entropy": {"place": "loss", "coefficient": 0.1}}
    x = batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN)
    entropy = torch.linspace(0.1, 1.0, 10, dtype=torch.float64).requires_grad_()
    objective = batch_v.objective(values)
    assert "entropy" in objective.needs
    loss, metrics = objective(dataclasses.replace(x, optional={**x.optional, "entropy": entropy}))
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, torch.full((10,), -0.01, dtype=torch.float64))
    assert float(loss.detach()) == pytest.approx(float(batch_v.run(CLIPPED)[0]) - 0.1 * 0.55)
    assert to_floats(metrics)["pg/entropy"] == pytest.approx(0.55)


def test_kl_is_untouched_by_corrections(batch_v):
    kl = {"kl": {"place": "loss", "estimator": "k2", "coefficient": 1.0}}
    drop = {"correction": {"name": "mis", "max": 1e-6}}
    zero = torch.zeros(10, dtype=torch.float64)
    alone, _, _ = batch_v.run({**CLIPPED, **kl}, advantages=zero)
    dropped, _, metrics = batch_v.run({**CLIPPED, **kl, **drop})
    assert metrics["mm/reject"] == 1
    assert float(dropped) == pytest.approx(float(alone))


def test_reading_an_undeclared_field_names_it(batch_v):
    x = dataclasses.replace(batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN), optional={})
    with pytest.raises(AttributeError, match="old_logprobs was read but no part of the objective declared"):
        batch_v.objective(CLIPPED)(x)
