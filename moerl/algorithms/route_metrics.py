"""Routing drift: how far two routings of the same tokens are apart, and how the experts are loaded.

Two routings a (earlier, or rollout's) and b (later, or training's), each [t, l, k] expert ids; sets compare as sets.
Under replay, give the router's own top-k. Every number carries its law, so that micro-batches and ranks merge exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moerl.algorithms.load_metrics import LoadTracker, expert_counts, load_metrics, load_of_counts
from moerl.algorithms.mismatch_metrics import mismatch_metrics
from moerl.metrics import Mean, Metrics, Min, Quantile

__all__ = [
    "LoadTracker",
    "drift_metrics",
    "drift_of",
    "expert_counts",
    "gamma_metrics",
    "load_metrics",
    "load_of_counts",
    "mismatch_metrics",
    "route_metrics",
    "router_shift_gamma",
]

_CHUNK_ELEMENTS = 1 << 22
"""Elements of the largest temporary of a chunk: memory is bounded whatever the number of tokens."""
_MIN_LOG_PROB = math.log(1e-8)
_SUMMED = ("kl", "js", "tv")
"""Distances that nobody reads but as means."""


def route_metrics(
    a_routes: Tensor,
    b_routes: Tensor,
    mask: Tensor,
    *,
    prefix: str = "route",
    a_logq: Tensor | None = None,
    b_logq: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Metrics:
    """Set metrics of two routings, and distances of the two distributions where both are given.

    Args:
        a_routes: [t, l, k] expert ids.
        b_routes: [t, l, k] expert ids of the same tokens.
        mask: [t] bool: tokens that count (live, and with a route on both sides).
        prefix: `route`, `route_update`, `route_probe` or `route_long`.
        a_logq: [t, l, e] router log-probabilities of a over all experts.
        b_logq: [t, l, e] of b.
        layers: number of each of the l layers in `<prefix>/X/layer_007`; default 0, 1, ...
    """
    if a_routes.shape != b_routes.shape:
        raise ValueError(
            f"two routings of one batch must have one shape, not {[*a_routes.shape]} and {[*b_routes.shape]}"
        )
    logq = None if a_logq is None or b_logq is None else (a_logq[mask], b_logq[mask])
    drift = drift_of(a_routes[mask], b_routes[mask], logq)
    return drift_metrics(drift, a_routes.shape[2], prefix=prefix, layers=layers)


def drift_of(a_routes: Tensor, b_routes: Tensor, logq: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """What `drift_metrics` reads of two routings [m, l, k] of the same tokens, without an axis of experts.

    Every layer is for itself, so that what several pipeline stages found of their layers may be joined along axis 1.

    Args:
        a_routes: [m, l, k] expert ids.
        b_routes: [m, l, k] expert ids.
        logq: log-probabilities of a and of b over all experts, [m, l, e] each.

    Returns:
        `shared` [m, l], small integers: experts that both took. With `logq` also `dev` [m, l] float64, RSPO's deviation
        on a's experts, and the sums over the tokens [1, l] float64 of `kl` (of a from b), `js` and `tv`.
    """
    k = a_routes.shape[2]
    shared = _map_chunks(_shared_experts, a_routes, b_routes, width=k * k)
    found = {"shared": shared.to(torch.uint8 if k < 256 else torch.int16)}
    if logq is not None:
        distances = _distances(a_routes, *logq)
        found["dev"] = distances["dev"]
        found.update((name, distances[name].sum(0, keepdim=True)) for name in _SUMMED)
    return found


def drift_metrics(drift: Mapping[str, Tensor], k: int, *, prefix: str, layers: Sequence[int] | None = None) -> Metrics:
    """Of what `drift_of` found of two routings to `k` experts; `prefix` and `layers` as in `route_metrics`."""
    shared = drift["shared"].double()
    changed = shared < k
    named = layers if layers is not None else range(shared.shape[1])
    count = _count(shared)
    sums = {
        "set_change": changed.double().sum(0),
        "expert_change": (1 - shared / k).sum(0),
        "jaccard": (shared / (2 * k - shared)).sum(0),
    }
    metrics: Metrics = {}
    if "dev" in drift:
        sums.update({name: drift[name][0] for name in _SUMMED}, dev=drift["dev"].sum(0))
        metrics.update(_quantiles(f"{prefix}/dev", drift["dev"].flatten(), {"p90": 0.9, "p99": 0.99}))
    for name, totals in sums.items():
        metrics.update(_layer_means(f"{prefix}/{name}", totals, count, named))
    any_layer = changed.any(1).double()
    metrics[f"{prefix}/any_layer"] = Mean(any_layer.sum(), count)
    metrics[f"{prefix}/zero_deviation"] = Mean((1 - any_layer).sum(), count)
    metrics[f"{prefix}/layers_changed"] = Mean(changed.double().sum(), count)
    return metrics


def router_shift_gamma(old_logq_on_S: Tensor, new_logq_on_S: Tensor) -> Tensor:
    """Raw gamma [t] in (0, 1] of RSPO (arXiv 2510.23027): exp(-mean over layers of the mean deviation of log q).

    Args:
        old_logq_on_S: [t, l, k] log q under the old weights, on the experts that were active then.
        new_logq_on_S: [t, l, k] log q under the current weights, on the same experts.
    """
    return _map_chunks(_gamma, old_logq_on_S.detach(), new_logq_on_S.detach(), width=old_logq_on_S.shape[2])


def gamma_metrics(gamma: Tensor, mask: Tensor, gamma_min: float, *, prefix: str = "route") -> Metrics:
    """Mean, minimum, quantiles and floored fraction of the raw gamma [t] over the tokens of `mask`."""
    live = gamma.detach()[mask].double()
    count = _count(live)
    return {
        f"{prefix}/gamma_mean": Mean(live.sum(), count),
        f"{prefix}/gamma_min": Min(live.min() if len(live) else math.inf),
        f"{prefix}/gamma_floor_frac": Mean((live < gamma_min).double().sum(), count),
        **_quantiles(f"{prefix}/gamma", live, {"p01": 0.01, "p10": 0.1, "p50": 0.5}),
    }


def _map_chunks(function, a: Tensor, b: Tensor, *, width: int) -> Tensor:  # noqa: ANN001
    """Apply a function of two [c, l, x] slices over the tokens so that temporaries stay small."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, a.shape[1] * width))
    parts = [function(left, right) for left, right in zip(a.split(rows), b.split(rows), strict=True)]
    return torch.cat(parts)


def _shared_experts(a: Tensor, b: Tensor) -> Tensor:
    """Size of the intersection, [c, l] int64."""
    return (a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).sum(-1)


def _gamma(old_logq: Tensor, new_logq: Tensor) -> Tensor:
    return (-_deviation(old_logq, new_logq).mean(-1)).exp()


def _deviation(old_logq: Tensor, new_logq: Tensor) -> Tensor:
    """[c, l, k] -> [c, l]: mean absolute change of log q, logs floored at log 1e-8."""
    return (new_logq.clamp(min=_MIN_LOG_PROB) - old_logq.clamp(min=_MIN_LOG_PROB)).abs().mean(-1)


def _distances(a_routes: Tensor, a_logq: Tensor, b_logq: Tensor) -> dict[str, Tensor]:
    """KL(a||b), Jensen-Shannon, total variation and RSPO's deviation on a's experts: [t, l] float64 each."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, a_logq.shape[1] * a_logq.shape[2]))
    parts: dict[str, list[Tensor]] = {"kl": [], "js": [], "tv": [], "dev": []}
    for routes, a_part, b_part in zip(a_routes.split(rows), a_logq.split(rows), b_logq.split(rows), strict=True):
        a, b = (part.detach().double().clamp(min=-100.0) for part in (a_part, b_part))
        p, q = a.exp(), b.exp()
        middle = ((p + q) / 2).log()
        parts["kl"].append((p * (a - b)).sum(-1))
        parts["js"].append(0.5 * (p * (a - middle)).sum(-1) + 0.5 * (q * (b - middle)).sum(-1))
        parts["tv"].append(0.5 * (p - q).abs().sum(-1))
        on = routes.long()
        parts["dev"].append(_deviation(a.gather(-1, on), b.gather(-1, on)))
    return {name: torch.cat(values) for name, values in parts.items()}


def _layer_means(name: str, totals: Tensor, count: float, layers: Sequence[int]) -> Metrics:
    """`totals` [l] float64 over `count` tokens: the mean over all pairs, and per layer."""
    metrics: Metrics = {name: Mean(totals.sum(), count * totals.shape[0])}
    for layer, total in zip(layers, totals.unbind(), strict=True):
        metrics[f"{name}/layer_{layer:03d}"] = Mean(total, count)
    return metrics


def _quantiles(name: str, values: Tensor, levels: dict[str, float]) -> Metrics:
    """Quantiles of `values` [m]."""
    return {f"{name}_{label}": Quantile(level, (values,)) for label, level in levels.items()}


def _count(values: Tensor) -> float:
    return float(values.shape[0])
