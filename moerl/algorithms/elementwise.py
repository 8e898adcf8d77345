"""Passes over all tokens for which numpy takes a half (`exp`) to a seventh (comparisons) of torch's time.

On a device, and for types that numpy does not know, torch does them. A NaN compares as False and stays NaN elsewhere.
What they give is detached, but for `exp`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_OF_NUMPY = (torch.float32, torch.float64, torch.bool)


def suits_numpy(values: Tensor) -> bool:
    """Whether numpy can read `values` where they lie."""
    return values.device.type == "cpu" and values.dtype in _OF_NUMPY


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        raised = torch.from_numpy(np.exp(values.numpy()))
        ctx.save_for_backward(raised)
        return raised

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (raised,) = ctx.saved_tensors
        return grads[0] * raised


def exp(values: Tensor) -> Tensor:
    """e to the power of `values` [t], with gradient."""
    if not suits_numpy(values):
        return values.exp()
    if values.requires_grad:
        return _Exp.apply(values)  # pyright: ignore[reportReturnType]: apply is untyped
    return torch.from_numpy(np.exp(values.numpy()))


def is_above(values: Tensor, bound: Tensor | float) -> Tensor:
    """[t] bool: values > bound; a tensor `bound` is of the type of `values` [t]."""
    values = values.detach()
    if not suits_numpy(values):
        return values > bound
    return torch.from_numpy(values.numpy() > (bound.detach().numpy() if isinstance(bound, Tensor) else bound))


def is_below(values: Tensor, bound: float) -> Tensor:
    """[t] bool: values < bound."""
    values = values.detach()
    return torch.from_numpy(values.numpy() < bound) if suits_numpy(values) else values < bound


def zero_where(flags: Tensor, values: Tensor) -> Tensor:
    """[t]: 0 in place of the finite `values` where `flags` [t] bool; a product, which costs a third of a choice."""
    values = values.detach()
    if not suits_numpy(values):
        return values * ~flags
    return torch.from_numpy(values.numpy() * ~flags.numpy())


def choose(flags: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """[t]: `values` where `flags` [t] bool, else `others`; half the time of `torch.where` where few are flagged.

    For values without gradient, as in the forward of an autograd function.
    """
    if not suits_numpy(values):
        return torch.where(flags, values, others)
    chosen = others.numpy().copy()
    np.copyto(chosen, values.numpy(), where=flags.numpy())
    return torch.from_numpy(chosen)


def total(values: Tensor) -> float:
    """The sum of `values` [t], or how many are True."""
    values = values.detach()
    if values.dtype == torch.bool and suits_numpy(values):
        return float(np.count_nonzero(values.numpy()))
    return float(values.sum())
