"""How far trainer and engine disagree on the tokens they both have a probability for (`mm/*`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.ratio import clamp_log_ratio
from moerl.algorithms.segments import per_sequence
from moerl.metrics import Correlation, EffectiveSize, Max, Mean, Metrics

_EXTREMES = (("1.5", 1.5), ("2", 2.0), ("5", 5.0), ("10", 10.0))


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int, prefix: str = "mm"
) -> Metrics:
    """Every `mm/*` number of the pair, over live tokens whose two logprobs are finite.

    All of them merge exactly over micro-batches and ranks.

    Args:
        old_logprobs: [t]; the current ones instead give total off-policyness.
        rollout_logprobs: [t]; the old ones (with the current as `old_logprobs`) give staleness.
        mask: [t] bool.
        seq_ids: [t] int64, non-decreasing.
        num_seqs: n.
        prefix: group of the names.
    """
    old, rollout = old_logprobs.detach().double(), rollout_logprobs.detach().double()
    live = mask & old.isfinite() & rollout.isfinite()
    difference = torch.where(live, old - rollout, 0.0)
    sequences = _sequence_log_ratios(difference, live, seq_ids, num_seqs)
    c, old, rollout = difference[live], old[live], rollout[live]
    clamped = clamp_log_ratio(c)
    probability_gap = (old.exp() - rollout.exp()).abs()
    metrics: Metrics = {
        f"{prefix}/logp_abs_mean": _mean(c.abs()),
        f"{prefix}/logp_abs_max": _max(c.abs()),
        f"{prefix}/prob_abs_mean": _mean(probability_gap),
        f"{prefix}/prob_abs_max": _max(probability_gap),
        f"{prefix}/k1": _mean(-c),
        f"{prefix}/k3": _mean(torch.expm1(clamped) - clamped),
        f"{prefix}/pearson_prob": _pearson(old.exp(), rollout.exp()),
    }
    factor = clamped.abs().exp()
    metrics.update({f"{prefix}/extreme_{name}": _mean((factor > bound).double()) for name, bound in _EXTREMES})
    for level, log_ratios in (("token", clamped), ("seq", clamp_log_ratio(sequences))):
        weights = log_ratios.exp()
        metrics[f"{prefix}/ess_{level}"] = _effective_sample_size(weights)
        metrics[f"{prefix}/chi2_{level}"] = _mean(weights.square() - 1)
    return metrics


def _sequence_log_ratios(difference: Tensor, live: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """Sum of log-ratios of every sequence that has a live token."""
    total = per_sequence(difference, live, seq_ids, num_seqs)
    return total[per_sequence(live.double(), live, seq_ids, num_seqs) > 0]


def _mean(values: Tensor) -> Mean:
    return Mean(values.sum(), float(len(values)))


def _max(values: Tensor) -> Max:
    return Max(values.max() if len(values) else float("-inf"))


def _effective_sample_size(weights: Tensor) -> EffectiveSize:
    return EffectiveSize(weights.sum(), weights.square().sum(), float(len(weights)))


def _pearson(a: Tensor, b: Tensor) -> Correlation:
    if not len(a):
        return Correlation(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    mean_a, mean_b = a.mean(), b.mean()
    da, db = a - mean_a, b - mean_b
    return Correlation(float(len(a)), mean_a, mean_b, da.square().sum(), db.square().sum(), (da * db).sum())
