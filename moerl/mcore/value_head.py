"""The critic's head: one number per row of hidden states, in float32, block by block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20
"""Hidden entries that are float32 at a time, where the model has fewer bits."""


class _LinearValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        column = weight[0].to(_wide(hidden))
        values = torch.empty(hidden.shape[0], dtype=column.dtype, device=hidden.device)
        for start, block in _blocks(hidden):
            values[start : start + len(block)] = block.to(column.dtype) @ column
        return values + bias.to(column.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, bias = ctx.saved_tensors
        grad = grads[0]
        weight_grad = torch.zeros(hidden.shape[1], dtype=grad.dtype, device=grad.device)
        for start, block in _blocks(hidden):
            weight_grad.addmv_(block.to(grad.dtype).t(), grad[start : start + len(block)])
        hidden_grad = grad.to(hidden.dtype)[:, None] * weight.to(hidden.dtype)
        return hidden_grad, weight_grad[None].to(weight.dtype), grad.sum()[None].to(bias.dtype)


def linear_values(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """hidden @ weight[0] + bias, [r] float32 with gradient; no float32 copy of `hidden` [r, h] exists whole.

    Args:
        hidden: [r, h].
        weight: [1, h].
        bias: [1].
    """
    return _LinearValues.apply(hidden, weight, bias)  # pyright: ignore[reportReturnType] apply is untyped


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _blocks(hidden: Tensor) -> list[tuple[int, Tensor]]:
    rows = max(1, BLOCK_ELEMENTS // hidden.shape[1])
    return [(start, hidden[start : start + rows]) for start in range(0, hidden.shape[0], rows)]
