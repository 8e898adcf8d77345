"""What the step-0 contract is held to (`contract/*`): learner and engine at the same weights, new and old policy before
the first update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moerl.mcore.step import MicroResult
from moerl.metrics import Max, Mean, Metrics, masked_mean, merge_into
from moerl.types import MicroBatch


def rollout_agreement(
    batches: Sequence[MicroBatch], results: Sequence[MicroResult], *, has_experts: bool = True
) -> Metrics:
    """Learner against engine, both at the weights that made the data; nothing where routers had a say and the engine
    gave no routes.

    Two float32 forwards may choose different experts at a near tie; what comes of it (the layers above, and the rows
    after it in its sequence) differs by far more than rounding, and rightly. So a route is judged only where no route
    that it was computed from differs, and a logprob likewise. Every disagreement still has a first route or a logprob
    that is judged.
    """
    metrics: Metrics = {}
    real = [(batch, result) for batch, result in zip(batches, results, strict=True) if not batch.is_filler]
    if not has_experts:
        for batch, result in real:
            merge_into(metrics, _agreement_without_experts(batch, result.logprobs))
    elif all(batch.routes is not None for batch, _ in real):
        for batch, result in real:
            if result.kept:
                merge_into(metrics, _agreement(batch, result.logprobs, result.kept))
    return metrics


def _agreement(batch: MicroBatch, logprobs: Tensor, kept: Mapping[str, Tensor]) -> Metrics:
    assert batch.routes is not None
    theirs = batch.routes.long()
    differs = (theirs.sort(-1).values != kept["own_routes"].sort(-1).values).any(-1)  # [t, l]
    if batch.has_route is not None:
        differs &= batch.has_route[:, None]
    so_far = _any_so_far(differs, batch.cu_seqlens)
    below = torch.cat([torch.zeros_like(so_far[:, :1]), so_far.cummax(-1).values[:, :-1]], dim=-1)
    first = differs & ~below
    gap = kept["margin"].masked_fill(~first, 0.0)

    follows = torch.cat([so_far.new_zeros(1), so_far.any(-1)[:-1]]) & (batch.position_ids > 0)
    judged = batch.mask & ~follows
    return {
        "contract/logp_gap": _logp_gap(batch, logprobs, judged),
        "contract/route_margin": _largest(gap),
        "contract/judged_fraction": masked_mean(judged.float(), batch.mask),
    }


def _agreement_without_experts(batch: MicroBatch, logprobs: Tensor) -> Metrics:
    """Nothing where the completions are a file's, which nobody sampled."""
    if not bool(batch.rollout_logprobs[batch.mask].isfinite().any()):
        return {}
    return {
        "contract/logp_gap": _logp_gap(batch, logprobs, batch.mask),
        "contract/judged_fraction": masked_mean(batch.mask.float(), batch.mask),
    }


def _logp_gap(batch: MicroBatch, logprobs: Tensor, judged: Tensor) -> Max:
    return _largest((logprobs - batch.rollout_logprobs).abs()[judged])


def _any_so_far(flags: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[t, l] bool: whether the flag is set in this row or in one before it in its sequence."""
    totals = torch.cat([flags.new_zeros((1, flags.shape[1]), dtype=torch.int64), flags.long().cumsum(0)])
    bounds = cu_seqlens.long()
    return totals[1:] > totals[bounds[:-1]].repeat_interleave(bounds.diff(), dim=0)


def _largest(values: Tensor) -> Max:
    """A NaN is the largest."""
    return Max(values.max() if values.numel() else values.new_zeros(()))


def update_agreement(minibatch: Sequence[MicroBatch], results: Sequence[MicroResult], metrics: Metrics) -> Metrics:
    """Of a step's first minibatch, whose weights are the old ones: how far its ratios are from 1, and what share is
    clipped according to `metrics`.
    """
    found: Metrics = {}
    for batch, result in zip(minibatch, results, strict=True):
        if batch.old_logprobs is not None and not batch.is_filler:  # a file's completions are not scored
            gap = torch.where(batch.mask, result.logprobs - batch.old_logprobs, 0.0)
            merge_into(found, {"contract/ratio_deviation": Max(torch.expm1(gap).abs().max())})
    means = [metrics.get(name) for name in ("pg/clip_low", "pg/clip_high")]
    clipped = [mean for mean in means if isinstance(mean, Mean)]
    if clipped:
        total = sum(mean.total for mean in clipped)
        found["contract/clip_fraction"] = Mean(total, clipped[0].count)
    return found
