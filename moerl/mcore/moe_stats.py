"""From what routers saw to metrics: the pairs (rollout, old) and (old, current) on live tokens, aligned to predictions.

Token j is predicted by the forward of token j - 1, so its routing is row j - 1 of the pack; that shift is made here,
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.mismatch_metrics import mismatch_metrics
from moerl.algorithms.route_metrics import expert_counts, gamma_metrics, route_metrics, router_shift_gamma
from moerl.mcore.router_replay import Observation
from moerl.metrics import Max, Metrics, masked_mean
from moerl.types import MicroBatch, RouterStats


def predicting_rows(batch: MicroBatch) -> Tensor:
    """[m] int64: for every live token, in order, the row whose forward predicts it."""
    return torch.nonzero(batch.mask & (batch.position_ids > 0))[:, 0] - 1


def live_stats(batch: MicroBatch, observed: Observation) -> RouterStats:
    """The routers' own choice and log q on live tokens."""
    rows = predicting_rows(batch)
    return RouterStats(observed.own_routes[rows], observed.log_probs[rows])


def router_shift(batch: MicroBatch, observed: Observation, routes_old: Tensor) -> Tensor:
    """RSPO's raw gamma [t], detached: entry j is row j - 1's; 1 at the first token of a sequence.

    `routes_old` [t, l, k] is the set S that `batch.old_router_logprobs` was taken on.
    """
    assert batch.old_router_logprobs is not None
    now = observed.log_probs.gather(-1, routes_old)
    gamma = router_shift_gamma(batch.old_router_logprobs, now)
    shifted = torch.cat([gamma.new_ones(1), gamma[:-1]])
    return shifted.masked_fill(batch.position_ids == 0, 1.0)


@dataclass(frozen=True)
class _Pair:
    """Two routings of the same live tokens."""

    before: Tensor
    after: Tensor
    selection: Tensor
    """[m, l, e]: what the later top-k was taken of."""


def own_counts(batches: Sequence[MicroBatch], observed: Sequence[Observation], num_experts: int) -> Tensor:
    """[l, e] int64: live tokens that each expert would get by the routers' own choice."""
    own = torch.cat([seen.own_routes[predicting_rows(batch)] for batch, seen in zip(batches, observed, strict=True)])
    return expert_counts(own, torch.ones(own.shape[0], dtype=torch.bool, device=own.device), num_experts)


def rollout_pair_metrics(batches: Sequence[MicroBatch], observed: Sequence[Observation]) -> Metrics:
    """`route/*` of (rollout, old) on live tokens that have a route; nothing where the rollout gave none."""
    real = [(batch, seen) for batch, seen in zip(batches, observed, strict=True) if not batch.is_filler]
    if not real or any(batch.routes is None for batch, _ in real):
        return {}
    pairs = [_rollout_pair(batch, seen) for batch, seen in real]
    before, after = torch.cat([p.before for p in pairs]), torch.cat([p.after for p in pairs])
    everywhere = torch.ones(before.shape[0], dtype=torch.bool, device=before.device)
    metrics = route_metrics(before, after, everywhere, prefix="route")
    metrics["route/max_margin_of_changed"] = Max(torch.stack([_max_margin(pair) for pair in pairs]).max())
    return metrics


def _rollout_pair(batch: MicroBatch, seen: Observation) -> _Pair:
    rows = predicting_rows(batch)
    assert batch.routes is not None
    if batch.has_route is not None:
        rows = rows[batch.has_route[rows]]
    return _Pair(batch.routes[rows], seen.own_routes[rows], seen.selection[rows])


def _max_margin(pair: _Pair) -> Tensor:
    """The largest margin; 0 without any."""
    if not pair.before.numel():
        return pair.selection.new_zeros(())
    return margins(pair.before, pair.after, pair.selection).max()


def margins(before: Tensor, after: Tensor, selection: Tensor) -> Tensor:
    """[m, l]: how far the worst expert that only `before` took lies below the k-th of `after`; 0 where all are kept.

    Args:
        before: [m, l, k] experts.
        after: [m, l, k] experts, the top-k of `selection`.
        selection: [m, l, e] what the router chose by.
    """
    kth = selection.gather(-1, after).amin(-1, keepdim=True)
    kept = (before[..., :, None] == after[..., None, :]).any(-1)
    return (kth - selection.gather(-1, before)).masked_fill(kept, 0.0).amax(-1).clamp_min(0.0)


def update_pair_metrics(before: Sequence[RouterStats], after: Sequence[RouterStats]) -> Metrics:
    """`route_update/*` of (old, current) over one minibatch."""
    a, b = torch.cat([s.own_routes for s in before]), torch.cat([s.own_routes for s in after])
    a_logq, b_logq = _stack_logq(before), _stack_logq(after)
    everywhere = torch.ones(a.shape[0], dtype=torch.bool, device=a.device)
    return route_metrics(a, b, everywhere, prefix="route_update", a_logq=a_logq, b_logq=b_logq)


def _stack_logq(stats: Sequence[RouterStats]) -> Tensor | None:
    logq = [s.log_probs for s in stats if s.log_probs is not None]
    return torch.cat(logq) if len(logq) == len(stats) else None


def logprob_pair_metrics(batches: Sequence[MicroBatch], old: Sequence[Tensor]) -> Metrics:
    """`mm/*` of (rollout, old) over all of `batches` at once."""
    seq_ids, count = [], 0
    for batch in batches:
        seq_ids.append(batch.seq_ids + count)
        count += batch.num_seqs
    rollout = torch.cat([batch.rollout_logprobs for batch in batches])
    mask = torch.cat([batch.mask for batch in batches])
    return mismatch_metrics(torch.cat(list(old)), rollout, mask, torch.cat(seq_ids), count, "mm")


def was_sampled(batch: MicroBatch) -> bool:
    """Completions of a file have no logprobs: nobody sampled them."""
    return bool(batch.rollout_logprobs[batch.mask].isfinite().any())


def replay_coverage(batch: MicroBatch, *, covers_all: bool) -> Metrics:
    """`route/replay_coverage` over the rows that predict a live token; the last row of a sequence never has a route."""
    predicts = batch.mask.roll(-1)
    has_route = torch.ones_like(predicts) if covers_all or batch.has_route is None else batch.has_route
    return {"route/replay_coverage": masked_mean(has_route.double(), predicts)}


def shift_metrics(gammas: Sequence[Tensor], batches: Sequence[MicroBatch], gamma_min: float) -> Metrics:
    """`route_update/gamma_*` of one minibatch: the raw router-shift factor on live tokens."""
    mask = torch.cat([batch.mask for batch in batches])
    return gamma_metrics(torch.cat(list(gammas)), mask, gamma_min, prefix="route_update")
