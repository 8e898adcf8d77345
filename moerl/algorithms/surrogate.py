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
    def forward(ctx: Any, values: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        held = torch.clamp(values, lower, upper)
        moved = (held - values).sign_()
        ctx.save_for_backward(moved.abs().neg_().add_(1))
        ctx.mark_non_differentiable(moved)
        return held, moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None


def hold_by_sign(values: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Values at most `high` where A > 0 and at least `low` where A < 0; and the direction in which each moved.

    Gradient 1 where nothing moved, also on the bound, else 0. The direction is 1, 0 or -1.
    """
    sign = advantages.sign()
    upper = sign.neg().add_(1).mul_(_FAR).add_(high)  # exactly `high` where the sign is 1
    lower = sign.add(1).mul_(-_FAR).add_(low)
    return _Hold.apply(values, lower, upper)  # pyright: ignore[reportReturnType]: apply is untyped


class _Pessimistic(torch.autograd.Function):
    """max(-x A, -clip(x) A); what is kept for the backward pass is the slope itself."""

    @staticmethod
    def forward(
        ctx: Any, ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        against = advantages.neg()
        free = ratio * against
        held = torch.clamp(ratio, low, high)  # pyright: ignore[reportCallIssue, reportArgumentType]: both numbers or both tensors
        loss = torch.maximum(free, held.mul_(against))
        clipped = (loss - free).sign_()  # 1 where the bound binds, 0 elsewhere; NaN stays NaN
        ctx.save_for_backward(torch.addcmul(against, against, clipped, value=-1))
        ctx.mark_non_differentiable(clipped)
        return loss, clipped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None, None


def _one_clip(ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float) -> TokenLoss:
    """A bound binds only on the side where it lowers the objective: above for A > 0, below for A < 0."""
    loss, clipped = _Pessimistic.apply(ratio, advantages, low, high)  # pyright: ignore[reportGeneralTypeIssues]: untyped
    signed = clipped * advantages.sign()
    above = signed.clamp(min=0)
    metrics = {"pg/clip_low": above - signed, "pg/clip_high": above}
    return TokenLoss(loss, metrics, ratio.detach())


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
    if dual_c is None and delta is None:
        return _one_clip(ratio, advantages, low, high)
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
