"""Sums, means and extremes over packed sequences, given back on every token; deterministic on every device.

The sum over one's own sequence is a symmetric linear map, so its backward pass is itself: no atomic adds anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SequenceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, seq_ids: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(seq_ids, lengths)
        sums = torch.segment_reduce(values.contiguous(), "sum", lengths=lengths, unsafe=True, initial=0)
        return sums[seq_ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        seq_ids, lengths = ctx.saved_tensors
        return seq_sum(grads[0], seq_ids, lengths), None, None


def seq_lengths(seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[n] int64: tokens of each packed sequence, masked ones included."""
    return torch.bincount(seq_ids, minlength=num_seqs)


def seq_sum(values: Tensor, seq_ids: Tensor, lengths: Tensor) -> Tensor:
    """[t] -> [t]: the sum of `values` over each token's sequence. `seq_ids` [t] does not decrease, `lengths` is [n]."""
    return _SequenceSum.apply(values, seq_ids, lengths)  # pyright: ignore[reportReturnType]: apply is untyped


def masked_seq_sum(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t]: the sum over the masked tokens of each token's sequence; what is outside the mask is never read."""
    return seq_sum(torch.where(mask, values, 0), seq_ids, seq_lengths(seq_ids, num_seqs))


def masked_seq_mean(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t]: the mean over the masked tokens of each token's sequence; 0 where there are none."""
    lengths = seq_lengths(seq_ids, num_seqs)
    count = seq_sum(mask.to(values.dtype), seq_ids, lengths).clamp(min=1)
    return seq_sum(torch.where(mask, values, 0), seq_ids, lengths) / count


def masked_seq_max(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t]: the largest masked value of each token's sequence, detached; -inf where there are none."""
    filled = torch.where(mask, values.detach(), -torch.inf)
    lengths = seq_lengths(seq_ids, num_seqs)
    largest = torch.segment_reduce(filled, "max", lengths=lengths, unsafe=True, initial=-torch.inf)
    return largest[seq_ids]


def masked_seq_rank(values: Tensor, mask: Tensor, seq_ids: Tensor) -> Tensor:
    """[t] -> [t] int64: how many masked tokens of the same sequence are larger, the earlier ones of equals included;
    masked-out tokens come last.
    """
    filled = torch.where(mask, values.detach(), -torch.inf)
    by_value = filled.argsort(descending=True, stable=True)
    order = by_value[seq_ids[by_value].argsort(stable=True)]
    lengths = torch.bincount(seq_ids)
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(len(values), device=values.device) - starts[seq_ids[order]]
    return torch.empty_like(order).scatter(0, order, position)


def per_sequence(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [n]: the sum over the masked tokens of each sequence."""
    filled = torch.where(mask, values, 0)
    return torch.segment_reduce(filled, "sum", lengths=seq_lengths(seq_ids, num_seqs), unsafe=True, initial=0)
