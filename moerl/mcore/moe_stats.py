"""From what routers saw to metrics: the pairs (rollout, old) and (old, current) on live tokens, aligned to predictions.

Token j is predicted by the forward of token j - 1, so its routing is row j - 1 of the pack; that shift is made here,
once.

An observation has an axis of experts, so one of a whole step would not fit a device. `keep_*` take from that of one
micro-batch, right after its forward and layer by layer, what the metrics need; the rest reads nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moerl.algorithms.mismatch_metrics import mismatch_metrics
from moerl.algorithms.route_metrics import (
    drift_metrics,
    drift_of,
    expert_counts,
    gamma_metrics,
    route_metrics,
    router_shift_gamma,
)
from moerl.mcore.router_replay import Observation, compact
from moerl.metrics import Max, Metrics, masked_mean, merge_into
from moerl.types import MicroBatch, RouterStats

_CHUNK_ELEMENTS = 1 << 22
"""Of router scores at a time."""


def predicting_rows(batch: MicroBatch) -> Tensor:
    """[m] int64: for every live token, in order, the row whose forward predicts it."""
    return torch.nonzero(batch.mask & (batch.position_ids > 0))[:, 0] - 1


def of_layers(routes: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Those of `layers` among all MoE layers [t, l, k]; `routes` itself where these are all."""
    return routes if layers == tuple(range(routes.shape[1])) else routes[:, list(layers)]


def keep_live(batch: MicroBatch, seen: Observation, layers: tuple[int, ...]) -> dict[str, Tensor]:
    """`own_routes` [m, l, k] and `log_probs` [m, l, e] of live tokens: all there is, and large."""
    del layers
    rows = predicting_rows(batch)
    return {"own_routes": seen.own_routes[rows], "log_probs": seen.log_probs[rows]}


def keep_choice(batch: MicroBatch, seen: Observation, layers: tuple[int, ...]) -> dict[str, Tensor]:
    """What the pair (rollout, learner) is measured by.

    Returns:
        `own_routes` [t, l, k] as small integers, and where the rollout gave routes `margin` [t, l] float32: see
        `margins`; 0 where a token has no route.
    """
    kept = {"own_routes": compact(seen.own_routes, seen.log_probs.shape[-1])}
    if batch.routes is not None:
        rows = torch.arange(batch.num_tokens, device=batch.mask.device)
        if batch.has_route is not None:
            rows = rows[batch.has_route]
        kept["margin"] = seen.selection.new_zeros(batch.num_tokens, len(layers))
        theirs = of_layers(batch.routes, layers)
        for some in rows.split(max(1, _CHUNK_ELEMENTS // max(1, seen.selection[0:1].numel()))):
            kept["margin"][some] = margins(theirs[some].long(), seen.own_routes[some], seen.selection[some])
    return kept


def log_q_of_shift(
    batch: MicroBatch, seen: Observation, layers: tuple[int, ...], *, old_routes: Tensor, is_replaying: bool
) -> Tensor:
    """[t, l, k] float32: log q on the experts active under the old policy, all of `layers`.

    These are its own, `old_routes` [t, l, k]; or, where the rollout's are replayed, those.
    """
    used = old_routes
    if is_replaying and batch.routes is not None:
        replayed = of_layers(batch.routes, layers)
        used = replayed if batch.has_route is None else torch.where(batch.has_route[:, None, None], replayed, used)
    return seen.log_probs.gather(-1, used.long())


def keep_drift(batch: MicroBatch, seen: Observation, old: RouterStats) -> dict[str, Tensor]:
    """What the pair (old, current) is measured by: `drift_of` on live tokens, which `old` has of the same layers."""
    rows = predicting_rows(batch)
    assert old.log_probs is not None
    return drift_of(old.own_routes, seen.own_routes[rows], (old.log_probs, seen.log_probs[rows]))


def router_shift(batch: MicroBatch, now: Tensor) -> Tensor:
    """RSPO's raw gamma [t], detached: entry j is row j - 1's; 1 at the first token of a sequence.

    `now` [t, l, k] is log q on the set that `batch.old_router_logprobs` was taken on.
    """
    assert batch.old_router_logprobs is not None
    gamma = router_shift_gamma(batch.old_router_logprobs, now)
    shifted = torch.cat([gamma.new_ones(1), gamma[:-1]])
    return shifted.masked_fill(batch.position_ids == 0, 1.0)


def own_counts(batches: Sequence[MicroBatch], kept: Sequence[Mapping[str, Tensor]], num_experts: int) -> Tensor:
    """[l, e] int64: live tokens that each expert would get by the routers' own choice."""
    counts = []
    for batch, of_batch in zip(batches, kept, strict=True):
        own = of_batch["own_routes"][predicting_rows(batch)]
        counts.append(expert_counts(own, torch.ones(own.shape[0], dtype=torch.bool, device=own.device), num_experts))
    return torch.stack(counts).sum(0)


def rollout_pair_metrics(batches: Sequence[MicroBatch], kept: Sequence[Mapping[str, Tensor]]) -> Metrics:
    """`route/*` of (rollout, old) on live tokens that have a route, from what `keep_choice` kept; nothing where the
    rollout gave none.
    """
    real = [(batch, of_batch) for batch, of_batch in zip(batches, kept, strict=True) if not batch.is_filler]
    if not real or any(batch.routes is None for batch, _ in real):
        return {}
    metrics: Metrics = {}
    largest = []
    for batch, of_batch in real:
        rows = predicting_rows(batch)
        assert batch.routes is not None
        if batch.has_route is not None:
            rows = rows[batch.has_route[rows]]
        everywhere = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
        theirs, own = batch.routes[rows], of_batch["own_routes"][rows]
        merge_into(metrics, route_metrics(theirs, own, everywhere, prefix="route"))
        margin = of_batch["margin"][rows]
        largest.append(margin.max() if margin.numel() else margin.new_zeros(()))
    metrics["route/max_margin_of_changed"] = Max(torch.stack(largest).max())
    return metrics


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


def update_pair_metrics(kept: Sequence[Mapping[str, Tensor]], topk: int) -> Metrics:
    """`route_update/*` of (old, current) over one minibatch, from what `keep_drift` kept."""
    metrics: Metrics = {}
    for drift in kept:
        merge_into(metrics, drift_metrics(drift, topk, prefix="route_update"))
    return metrics


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
