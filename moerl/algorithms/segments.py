"""Sums, means and extremes over packed sequences, given back on every token; deterministic on every device.

Summing over a sequence and giving a value to all its tokens are each other's backward pass: no atomic adds anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.elementwise import suits_numpy


class _Totals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, seq_ids: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(seq_ids, lengths)
        return _sums(values, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        seq_ids, lengths = ctx.saved_tensors
        return spread(grads[0], seq_ids, lengths), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, per_seq: Tensor, seq_ids: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(seq_ids, lengths)
        return _spread(per_seq, seq_ids, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        seq_ids, lengths = ctx.saved_tensors
        return seq_totals(grads[0], seq_ids, lengths), None, None


def seq_totals(values: Tensor, seq_ids: Tensor, lengths: Tensor) -> Tensor:
    """[t] -> [n]: the sum of each sequence."""
    if not values.requires_grad:  # autograd's own call costs as much as a pass over a block
        return _sums(values, lengths)
    return _Totals.apply(values, seq_ids, lengths)  # pyright: ignore[reportReturnType]: apply is untyped


def spread(per_seq: Tensor, seq_ids: Tensor, lengths: Tensor) -> Tensor:
    """[n] -> [t]: each sequence's value on all its tokens."""
    if not per_seq.requires_grad:
        return _spread(per_seq, seq_ids, lengths)
    return _Spread.apply(per_seq, seq_ids, lengths)  # pyright: ignore[reportReturnType]: apply is untyped


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """[t] -> [n]. Numpy adds pairwise within each sequence: more exact than torch's CPU sum, which adds one by one, and
    five times as fast.
    """
    if not suits_numpy(values):
        return torch.segment_reduce(values.contiguous(), "sum", lengths=lengths, unsafe=True, initial=0)
    counts = lengths.numpy()
    filled = counts > 0
    sums = np.zeros(len(counts), values.numpy().dtype)
    if filled.any():
        with np.errstate(invalid="ignore", over="ignore"):  # the sum says so itself
            sums[filled] = np.add.reduceat(values.numpy(), (counts.cumsum() - counts)[filled])
    return torch.from_numpy(sums)


def _spread(per_seq: Tensor, seq_ids: Tensor, lengths: Tensor) -> Tensor:
    """[n] -> [t]. Runs of one value are written by numpy five times as fast as torch looks them up."""
    if not suits_numpy(per_seq):
        return per_seq.index_select(0, seq_ids)
    return torch.from_numpy(np.repeat(per_seq.numpy(), lengths.numpy()))


def answers_at_once(values: Tensor) -> bool:
    """Whether a question about the values needs no wait for a device, so that a short cut may ask it.

    Short cuts change no result: they leave out work that would not change one.
    """
    return values.device.type == "cpu"


def is_full(mask: Tensor) -> bool:
    """Every token is in the mask; False where only a device could tell, which is not waited for."""
    return answers_at_once(mask) and (not mask.numel() or bool(mask.view(torch.uint8).amin()))


def seq_lengths(seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[n] int64: tokens of each packed sequence, masked ones included."""
    edges = torch.arange(num_seqs + 1, device=seq_ids.device, dtype=seq_ids.dtype)
    return torch.searchsorted(seq_ids, edges).diff()  # sorted already: a few look-ups in place of a pass over [t]


def seq_sum(values: Tensor, seq_ids: Tensor, lengths: Tensor) -> Tensor:
    """[t] -> [t]: the sum of `values` over each token's sequence. `seq_ids` [t] does not decrease, `lengths` is [n]."""
    return spread(seq_totals(values, seq_ids, lengths), seq_ids, lengths)


def masked_seq_sum(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t]: the sum over the masked tokens of each token's sequence; what is outside the mask is never read."""
    kept = values if is_full(mask) else torch.where(mask, values, 0)
    return seq_sum(kept, seq_ids, seq_lengths(seq_ids, num_seqs))


def masked_seq_means(values: Tensor, mask: Tensor, seq_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[t] -> [n]: the mean over the masked tokens of each sequence, 0 where there are none; and their number, at least
    1.
    """
    if is_full(mask):
        kept, counts = values, lengths.to(values.dtype)
    else:
        kept, counts = torch.where(mask, values, 0), _sums(mask.to(values.dtype), lengths)
    counts = counts.clamp(min=1)
    return seq_totals(kept, seq_ids, lengths) / counts, counts


def masked_seq_mean(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t]: the mean over the masked tokens of each token's sequence; 0 where there are none."""
    lengths = seq_lengths(seq_ids, num_seqs)
    return spread(masked_seq_means(values, mask, seq_ids, lengths)[0], seq_ids, lengths)


def masked_seq_max(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t]: the largest masked value of each token's sequence, detached; -inf where there are none."""
    filled = torch.where(mask, values.detach(), -torch.inf)
    lengths = seq_lengths(seq_ids, num_seqs)
    largest = torch.segment_reduce(filled, "max", lengths=lengths, unsafe=True, initial=-torch.inf)
    return _spread(largest, seq_ids, lengths)


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
    filled = values if is_full(mask) else torch.where(mask, values, 0)
    return seq_totals(filled, seq_ids, seq_lengths(seq_ids, num_seqs))
