"""Expert load: how evenly tokens are spread over the experts of each layer, and how that moves from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.metrics import Last, Metrics


def expert_counts(routes: Tensor, mask: Tensor, num_experts: int) -> Tensor:
    """[l, e] int64: how many (token, slot) assignments each expert got; add over micro-batches and ranks.

    Args:
        routes: [t, l, k] expert ids.
        mask: [t] bool: tokens that count, so that padding fills no expert.
        num_experts: e.
    """
    live = routes[mask]
    num_layers = live.shape[1]
    offsets = torch.arange(num_layers, device=live.device).view(1, -1, 1) * num_experts
    flat = (live.long() + offsets).flatten()
    return torch.bincount(flat, minlength=num_layers * num_experts).view(num_layers, num_experts)


def load_metrics(routes: Tensor, mask: Tensor, num_experts: int, *, layers: Sequence[int] | None = None) -> Metrics:
    """`load_of_counts` of all tokens in one call."""
    return load_of_counts(expert_counts(routes, mask, num_experts), layers=layers)


def load_of_counts(counts: Tensor, *, layers: Sequence[int] | None = None) -> Metrics:
    """`load/*` per layer and their means over layers, from the counts [l, e] of a whole step; {} without any token.

    entropy: of the shares, 1 if even. cv: std / mean of the shares. max, min: times the even share. dead: experts
    without a token. below_tenth: experts under a tenth of the even share.
    """
    if not counts.numel() or not counts.sum():
        return {}
    shares = load_shares(counts)
    num_experts = shares.shape[1]
    even = shares * num_experts
    values = {
        "entropy": _entropy(shares),
        "cv": shares.std(1, correction=0) / shares.mean(1),
        "max": even.max(1).values,
        "min": even.min(1).values,
        "dead": (shares == 0).sum(1).double(),
        "below_tenth": (even < 0.1).sum(1).double(),
    }
    return _per_layer(values, layers)


def load_shares(counts: Tensor) -> Tensor:
    """[l, e] float64: each expert's share of its layer's assignments."""
    counts = counts.double()
    total = counts.sum(1, keepdim=True)
    return torch.where(total > 0, counts / total, 0.0)


def _entropy(shares: Tensor) -> Tensor:
    if shares.shape[1] == 1:
        return torch.ones(shares.shape[0], dtype=torch.float64)
    return -torch.xlogy(shares, shares).sum(1) / torch.log(torch.tensor(float(shares.shape[1]), dtype=torch.float64))


def _per_layer(values: Mapping[str, Tensor], layers: Sequence[int] | None) -> Metrics:
    metrics: Metrics = {}
    for name, numbers in values.items():
        metrics[f"load/{name}"] = Last(float(numbers.mean()))
        for layer, number in zip(layers or range(len(numbers)), numbers.tolist(), strict=True):
            metrics[f"load/{name}/layer_{layer:03d}"] = Last(number)
    return metrics


class LoadTracker:
    """Drift of the load: total variation from the step before, and from the first step seen."""

    def __init__(self) -> None:
        self._first: list[list[float]] | None = None
        self._previous: list[list[float]] | None = None

    def update(self, load: Tensor | np.ndarray, *, layers: Sequence[int] | None = None) -> Metrics:
        """`load/drift_tv` and `load/drift_tv_first` of a step's load; {} for the first step and one without a token.

        Args:
            load: [l, e] counts or shares of the whole step.
            layers: numbers of the l layers.
        """
        shares = load_shares(torch.as_tensor(load).cpu())
        if not shares.sum() > 0:
            return {}
        seen = {"drift_tv": self._previous, "drift_tv_first": self._first}
        drifts = {name: _total_variation(shares, rows) for name, rows in seen.items() if rows is not None}
        self._previous = shares.tolist()
        self._first = self._previous if self._first is None else self._first
        return _per_layer(drifts, layers)

    def state_dict(self) -> dict[str, Any]:
        """Shares of the first and of the previous step, plain JSON."""
        return {"first": self._first, "previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            CheckpointError: `state` was not made by `state_dict`.
        """
        if set(state) != {"first", "previous"}:
            raise CheckpointError(f"expert-load state has the keys {sorted(state)}, not first and previous")
        self._first, self._previous = state["first"], state["previous"]


def _total_variation(shares: Tensor, earlier: list[list[float]]) -> Tensor:
    return 0.5 * (shares - torch.tensor(earlier, dtype=torch.float64)).abs().sum(1)
