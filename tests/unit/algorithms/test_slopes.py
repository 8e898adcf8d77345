"""Slopes in place of a backward pass: the same loss, gradient and metrics, with masks, clamps and corrections too."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moerl.algorithms import blocks, segments
from moerl.algorithms.types import TokenLoss
from moerl.metrics import to_floats

POINTS = {
    "clip": {"trust": {"name": "clip"}},
    "clip_seq": {"level": "seq_geo", "trust": {"name": "clip"}},
    "clip_prod": {"level": "seq_prod", "trust": {"name": "clip"}},
    "gspo_token": {"level": "seq_geo_token", "trust": {"name": "clip"}},
    "cispo": {"form": "score", "trust": {"name": "is_clip", "max": 1.2}},
    "cispo_mask": {"form": "score", "trust": {"name": "is_clip", "max": 1.2, "mask": True}},
    "gmpo": {"level": "geo_clip", "trust": {"name": "log_clip", "lo": 0.1, "hi": 0.3}},
    "tis": {"trust": {"name": "clip"}, "correction": {"name": "tis", "cap": 1.1}},
    "mis": {"trust": {"name": "clip"}, "correction": {"name": "mis", "min": 0.9, "max": 1.1}},
    "mis_gmpo": {
        "level": "geo_clip",
        "trust": {"name": "log_clip"},
        "correction": {"name": "rs", "stat": "token", "estimator": "k1", "min_ratio": 0.95, "max_ratio": 1.05},
    },
}
NO_KL = {"kl": {"place": "none"}}


def both_ways(batch_v, monkeypatch, values, **changed):
    """(loss, gradient, metrics) by autograd over the whole, and in blocks by slopes; whether slopes had an answer."""
    objective = batch_v.objective({**NO_KL, **values})
    assert objective.has_slopes
    asked = []

    def count(name):
        original = getattr(type(objective), name)

        def counted(self, x, out):
            found = original(self, x, out)
            asked.append(found is not None)
            return found

        monkeypatch.setattr(type(objective), name, counted)

    count("slopes")
    count("sequence_slopes")
    found = []
    for size in (10**6, 4):
        monkeypatch.setattr(blocks, "BLOCK_TOKENS", size)
        leaf = changed.get("logprobs", batch_v.now).clone().requires_grad_()
        others = {name: given for name, given in changed.items() if name != "logprobs"}
        x = batch_v.inputs(leaf, aggregation={"name": "seq_mean_token_mean"})
        read = {name: x.optional[name] for name in objective.needs - {"rollout_logprobs"}}
        x = dataclasses.replace(x, optional=read, **others)
        loss, metrics = objective(x)
        (gradient,) = torch.autograd.grad(2 * loss, leaf)
        found.append((loss.detach(), gradient, to_floats(metrics)))
    return (*found, asked)


def assert_same(whole, cut):
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-15)
    assert cut[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", POINTS)
def test_slopes_are_the_gradient(batch_v, monkeypatch, name):
    whole, cut, asked = both_ways(batch_v, monkeypatch, POINTS[name])
    assert_same(whole, cut)
    assert asked
    assert all(asked)


@pytest.mark.parametrize("name", POINTS)
def test_also_under_a_mask_and_where_an_engine_logprob_is_missing(batch_v, monkeypatch, name):
    mask = torch.ones(10, dtype=torch.bool)
    mask[[1, 7]] = False
    rollout = batch_v.rollout.clone()
    rollout[4] = math.nan
    whole, cut, asked = both_ways(batch_v, monkeypatch, POINTS[name], mask=mask, rollout_logprobs=rollout)
    assert_same(whole, cut)
    assert all(asked)  # one ratio for a sequence takes the plain way: it was not asked


@pytest.mark.parametrize("name", POINTS)
def test_no_gradient_through_a_clamped_log_ratio(batch_v, monkeypatch, name):
    far = batch_v.now.clone()
    far[2], far[6] = far[2] - 300.0, far[6] + 300.0
    assert_same(*both_ways(batch_v, monkeypatch, POINTS[name], logprobs=far)[:2])


def test_only_the_block_with_an_infinite_logprob_takes_the_plain_way(batch_v, monkeypatch):
    far = batch_v.now.clone()
    far[9] = -math.inf
    whole, cut, asked = both_ways(batch_v, monkeypatch, POINTS["clip_seq"], logprobs=far)
    assert_same(whole, cut)
    assert asked == [False, True, True, False]  # all at once, then block by block


@pytest.mark.parametrize(
    "values",
    [
        {"trust": {"name": "clip", "dual_c": 3.0}, **NO_KL},
        {"trust": {"name": "clip"}, "kl": {"place": "loss"}},
        {"trust": {"name": "clip"}, **NO_KL, "entropy": {"place": "loss", "coefficient": 0.1}},
        {"trust": {"name": "clip"}, **NO_KL, "positive_nll": {"coefficient": 0.1}},
        {"trust": {"name": "soft_gate"}, **NO_KL},
        {"objective": {"name": "group_dpo"}, "trust": {"name": "clip"}, **NO_KL},
    ],
)
def test_only_a_policy_term_alone_has_slopes(batch_v, values):
    if "objective" in values:
        values = {**values, "advantage": {"transform": {"name": "best_worst"}}, "aggregation": {"name": "prompt_mean"}}
    assert not batch_v.objective(values).has_slopes


def test_a_promised_slope_that_is_missing_is_an_error(batch_v):
    objective = batch_v.objective({**NO_KL, "trust": {"name": "clip"}})
    lazy = dataclasses.replace(objective.policy, trust=lambda log_ratio, x, cfg: TokenLoss(-log_ratio * x.advantages))
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    with pytest.raises(TypeError, match="without slope"):
        dataclasses.replace(objective, policy=lazy).slopes(x, torch.empty(10))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sequence_sums_by_either_library(dtype):
    seq_ids = torch.tensor([0, 0, 2, 2, 2, 5])
    lengths = segments.seq_lengths(seq_ids, 7)
    values = torch.tensor([1.0, 2.0, -4.0, 8.0, 0.5, 3.0], dtype=dtype)
    sums = segments.seq_totals(values, seq_ids, lengths)
    assert sums.dtype == dtype
    assert sums.tolist() == [3.0, 0.0, 4.5, 0.0, 0.0, 3.0, 0.0]
    assert segments.spread(sums, seq_ids, lengths).tolist() == [3.0, 3.0, 4.5, 4.5, 4.5, 3.0]
    empty = torch.zeros(0, dtype=dtype)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert segments.seq_totals(empty, nothing, segments.seq_lengths(nothing, 2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("few", [0, 10**9])
def test_ids_of_a_part_start_at_zero_or_not(batch_v, monkeypatch, few):
    monkeypatch.setattr(blocks, "_FEW", few)
    assert_same(*both_ways(batch_v, monkeypatch, POINTS["gmpo"])[:2])
