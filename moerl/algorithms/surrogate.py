"""The pessimistic clipped surrogate that several trust regions share, with bounds that may differ per token."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.types import TokenLoss


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    bounds: tuple[Tensor | float, Tensor | float],
    *,
    dual_c: float | None = None,
    delta: float | None = None,
) -> TokenLoss:
    """-min(x A, clip(x, low, high) A) with dual clip (arXiv 1912.09729) and two-sided delta (arXiv 2505.07291).

    At x exactly on a bound the gradient is that of the unclipped branch.
    """
    low, high = bounds
    positive = advantages > 0
    negative = advantages < 0
    metrics = {"pg/clip_low": negative & (ratio < low), "pg/clip_high": positive & (ratio > high)}
    clipped = metrics["pg/clip_low"] | metrics["pg/clip_high"]
    # A bound binds only on the side where it lowers the objective, so min() is a choice by the sign of the advantage.
    bound = torch.where(positive, torch.as_tensor(high, dtype=ratio.dtype, device=ratio.device), low)
    effective = torch.where(clipped, bound, ratio)
    ceilings = {"pg/delta": delta, "pg/dual": dual_c}
    for name, ceiling in ceilings.items():
        if ceiling is not None:
            metrics[name] = negative & (effective.detach() > ceiling)
            effective = torch.where(metrics[name], ceiling, effective)
    return TokenLoss(-effective * advantages, metrics)
