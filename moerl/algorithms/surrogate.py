"""The pessimistic clipped surrogate that several trust regions share, with bounds that may differ per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.types import TokenLoss

_FAR = 1e6
"""Added to a bound that must not bind; a log-ratio is held within 20 before."""


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        held = torch.clamp(values, lower, upper)
        moved = (held - values).sign_()
        inside = moved.abs().neg_().add_(1)
        ctx.save_for_backward(inside)
        ctx.mark_non_differentiable(moved, inside)
        return held, moved, inside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None


def hold_by_sign(values: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """Values at most `high` where A > 0 and at least `low` where A < 0; the direction each moved in; and the gradient.

    The direction is 1, 0 or -1. The gradient is 1 where nothing moved, also on the bound, else 0.
    """
    sign = advantages.sign()
    upper = sign.neg().add_(1).mul_(_FAR).add_(high)  # exactly `high` where the sign is 1
    lower = sign.add(1).mul_(-_FAR).add_(low)
    return _Hold.apply(values, lower, upper)  # pyright: ignore[reportReturnType]: apply is untyped


class _Pessimistic(torch.autograd.Function):
    """max(-x A, -clip(x) A) of x = exp(log-ratio), with its slope by the log-ratio."""

    @staticmethod
    def forward(
        ctx: Any, log_ratio: Tensor, advantages: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ratio = log_ratio.exp()
        against = advantages.neg()
        free = ratio * against
        loss = torch.clamp(ratio, low, high).mul_(against)
        torch.maximum(free, loss, out=loss)
        clipped = (loss - free).sign_()  # 1 where the bound binds, 0 elsewhere; NaN stays NaN
        slope = free.addcmul_(free, clipped, value=-1)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(slope, ratio, clipped)
        return loss, slope, ratio, clipped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None, None


def clip_once(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """-min(x A, clip(x, low, high) A): a bound binds only on the side where it lowers the objective.

    At x exactly on a bound the gradient is that of the unclipped branch.
    """
    loss, slope, ratio, clipped = _Pessimistic.apply(log_ratio, advantages, low, high)  # pyright: ignore[reportGeneralTypeIssues]: untyped
    signed = clipped.mul_(advantages.sign())
    above = signed.clamp(min=0)
    metrics = {"pg/clip_low": above - signed, "pg/clip_high": above}
    return TokenLoss(loss, metrics, ratio, slope)


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
