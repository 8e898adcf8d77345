"""Laws of every preset on random ragged batches: cuts, masks, order, labels, precision, policies that agree."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_batches import SPREADS, make_batch, tensors
from oracle_methods import METHODS
from oracle_product import PRESETS, WEIGHT_TERMS, evaluate, loss_inputs, part, preset

from moerl.metrics import merge_into, to_floats
from moerl.types import TokenWeights

PAIRS = {"group_dpo"}
KINDS = st.sampled_from(sorted(SPREADS))
SEEDS = st.integers(0, 2**32)
OWN_GRADIENT = {name for name, m in METHODS.items() if m.rho is not None or m.pairs is not None or m.mu or m.beta}
"""Token weights, pairs, a likelihood term, a KL: by design not the policy gradient where all policies agree."""


def cut_at_random(x, seed, *, whole_groups):
    """All sequences in random order on one to three ranks of one to three micro-batches, some of them without any."""
    rng = random.Random(seed)
    ranks = [[[] for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]
    groups = x.optional["group_ids"].tolist() if whole_groups else list(range(x.num_seqs))
    home = {group: rng.choice(rng.choice(ranks)) for group in sorted(set(groups))}
    order = list(range(x.num_seqs))
    rng.shuffle(order)
    for i in order:
        home[groups[i]].append(i)
    return [[rows for rows in rank if rows] for rank in ranks]


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=2)
@given(seed=SEEDS, kind=KINDS, dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_any_cut_into_ranks_and_micro_batches_is_the_whole(name, seed, kind, dtype):
    """A runtime that averages gradients over W ranks multiplies each rank's loss by W; metrics merge to the same."""
    method = preset(name)
    x = loss_inputs(method, make_batch(f"{name} {seed}", kind, dtype), dtype)
    whole_loss, whole_gradient, whole_metrics = evaluate(method, x)
    ranks = cut_at_random(x, seed, whole_groups=name in PAIRS)
    total, gradient, merged = 0.0, torch.zeros_like(whole_gradient), {}
    for rank in ranks:
        for rows in rank:
            cut, at = part(x, rows)
            found, slope, metrics = evaluate(method, cut)
            total += len(ranks) * float(found)
            gradient[at] += len(ranks) * slope
            merge_into(merged, metrics)
    total, gradient = total / len(ranks), gradient / len(ranks)
    size = float(method.objective.token_losses(x)[0].abs().sum())
    exact = dtype == torch.float64
    assert total == pytest.approx(float(whole_loss), abs=(1e-12 if exact else 1e-6) * size + 1e-15)
    rtol = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(gradient, whole_gradient, rtol=rtol, atol=1e-14 if exact else 1e-12)
    # In float32 a mean of log-ratios up to 20 that cancel keeps three digits after the point.
    close = {"rel": 1e-9, "abs": 1e-12} if exact else {"rel": 1e-3, "abs": 2e-3}
    assert to_floats(merged) == pytest.approx(to_floats(whole_metrics), **close)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=2)
@given(seed=SEEDS, dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_whatever_is_under_the_mask_of_any_input_changes_nothing(name, seed, dtype):
    """Each input in turn, each kind of garbage: loss, gradient and metrics to the last bit."""
    method = preset(name)
    x = loss_inputs(method, make_batch(f"{name} {seed}", "wild", dtype, garbage=False), dtype)
    kept_loss, kept_gradient, kept_metrics = evaluate(method, x)
    fields = ("logprobs", "rollout_logprobs", "advantages", "weights", *(n for n in x.optional if n != "group_ids"))
    rng = random.Random(seed)
    for field in fields:
        garbage = rng.choice((math.nan, math.inf, -math.inf, 1e30, -1e30, 1e4))
        found_loss, gradient, metrics = evaluate(method, _spoilt(x, field, garbage))
        assert torch.equal(found_loss, kept_loss), (field, garbage)
        assert torch.equal(gradient, kept_gradient), (field, garbage)
        assert to_floats(metrics) == to_floats(kept_metrics), (field, garbage)


def _spoilt(x, field, garbage):
    def spoil(values):
        mask = x.mask if values.dim() == 1 else x.mask.unsqueeze(1)
        return torch.where(mask, values, garbage)

    if field == "weights":
        spoilt = (spoil(getattr(x.weights, term)) for term in WEIGHT_TERMS)
        return dataclasses.replace(x, weights=TokenWeights(*spoilt))
    if field in x.optional:
        return dataclasses.replace(x, optional={**x.optional, field: spoil(x.optional[field])})
    return dataclasses.replace(x, **{field: spoil(getattr(x, field))})


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=2)
@given(seed=SEEDS)
def test_labels_of_groups_and_order_of_answers_do_not_matter(name, seed):
    """From the rewards on, so that credit and denominators are part of it; answers without a token are among them."""
    batch = make_batch(f"{name} {seed}", "wild")
    rng = random.Random(seed)
    order = list(range(len(batch)))
    if name not in PAIRS:  # of answers that tie, the first is taken
        rng.shuffle(order)
    names = dict(zip((3, -7, 40, 41), rng.sample(range(-50, 50), 4), strict=True))
    moved = [dataclasses.replace(batch[i], group=names[batch[i].group]) for i in order]
    found, again = (preset(name)(**tensors(b, torch.float64, skip=("advantages",))) for b in (batch, moved))
    bounds = torch.tensor([0, *(len(s.mask) for s in batch)]).cumsum(0).tolist()
    rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    torch.testing.assert_close(again.gradient, found.gradient[rows], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(again.advantages, found.advantages[rows], rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=2)
@given(seed=SEEDS)
def test_bfloat16_is_widened_before_anything_is_computed(name, seed):
    """The same numbers in float32 give the same loss, and the same gradient rounded."""
    batch = make_batch(f"{name} {seed}", "wild", torch.bfloat16)
    narrow = preset(name)(**tensors(batch, torch.bfloat16, skip=("advantages",)))
    wide = preset(name)(**tensors(batch, torch.float32, skip=("advantages",)))
    assert narrow.loss.dtype == torch.float32
    assert torch.equal(narrow.loss, wide.loss)
    assert torch.equal(narrow.gradient, wide.gradient.bfloat16())


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in OWN_GRADIENT])
@settings(max_examples=2)
@given(seed=SEEDS)
def test_where_all_policies_agree_the_gradient_is_the_policy_gradient(name, seed):
    batch = [
        dataclasses.replace(s, now=list(s.old), roll=s.old, gamma=[1.0] * len(s.mask), top_roll=s.top_now)
        for s in make_batch(f"{name} {seed}", "wild", garbage=False)
    ]
    method = preset(name)
    x = loss_inputs(method, batch)
    _, gradient, _ = evaluate(method, x)
    wanted = torch.where(x.mask, -x.weights.policy * x.advantages, 0.0)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", PRESETS)
def test_sequences_of_no_token_at_all(name):
    """Between, before and after the others: nobody's share, unless the convention counts them."""
    method = preset(name)
    x = loss_inputs(method, make_batch(7, "wild"))
    wanted_loss, wanted_gradient, wanted = evaluate(method, x)
    n = x.num_seqs
    spaced = dataclasses.replace(x, seq_ids=2 * x.seq_ids + 1, num_seqs=2 * n + 1)
    if "group_ids" in x.optional:
        ids = torch.full((2 * n + 1,), 99)
        ids[1::2] = x.optional["group_ids"]
        spaced = dataclasses.replace(spaced, optional={**x.optional, "group_ids": ids})
    found_loss, gradient, metrics = evaluate(method, spaced)
    torch.testing.assert_close(found_loss, wanted_loss, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-15)
    assert to_floats(metrics) == pytest.approx(to_floats(wanted), abs=1e-12)
