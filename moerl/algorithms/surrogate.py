"""The pessimistic clipped surrogate that several trust regions share, with bounds that may differ per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.elementwise import choose, exp, is_above, is_below, zero_where
from moerl.algorithms.types import TokenLoss


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, advantages: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        above = is_above(values, high) & is_above(advantages, 0)
        below = is_below(values, low) & is_below(advantages, 0)
        moved = above | below
        held = choose(moved, torch.clamp(values, low, high), values)
        ctx.save_for_backward(moved)
        ctx.mark_non_differentiable(above, below, moved)
        return held, above, below, moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (moved,) = ctx.saved_tensors
        return grads[0] * ~moved, None, None, None


def hold_by_sign(values: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values at most `high` where A > 0 and at least `low` where A < 0; which were above, below, and either of the two.

    The gradient is 1 where nothing moved, also on the bound, else 0.
    """
    return _Hold.apply(values, advantages, low, high)  # pyright: ignore[reportReturnType]: apply is untyped


class _Pessimistic(torch.autograd.Function):
    """max(-x A, -clip(x) A) of x = exp(log-ratio), with its slope by the log-ratio."""

    @staticmethod
    def forward(
        ctx: Any, log_ratio: Tensor, advantages: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ratio = exp(log_ratio)
        free = ratio * advantages
        bounded = torch.clamp(ratio, low, high).mul_(advantages)
        binds = is_above(free, bounded)
        torch.minimum(free, bounded, out=bounded)
        slope = zero_where(binds, free).neg_()
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(slope, ratio, binds)
        return bounded.neg_(), slope, ratio, binds

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None, None


def clip_once(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """-min(x A, clip(x, low, high) A): a bound binds only on the side where it lowers the objective.

    At x exactly on a bound the gradient is that of the unclipped branch.
    """
    loss, slope, ratio, binds = _Pessimistic.apply(log_ratio, advantages, low, high)  # pyright: ignore[reportGeneralTypeIssues]: untyped
    above = binds & is_above(advantages, 0)
    return TokenLoss(loss, {"pg/clip_low": binds ^ above, "pg/clip_high": above}, ratio, slope)


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
