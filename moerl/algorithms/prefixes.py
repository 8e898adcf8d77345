"""What the earlier tokens of a packed sequence say: running sums, minima and positions over its live tokens.

Detached; in float64 where a sum runs over the whole pack, so that what came before a sequence leaves no rounding in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.segments import seq_lengths


def positions(mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] int64: how many live tokens the sequence has up to each token, itself included; from 1 on live tokens."""
    return _running(mask.long(), seq_ids, num_seqs)


def prefix_sum(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t]: the sum over the sequence's live tokens up to each token, itself included."""
    live = torch.where(mask, values.detach().double(), 0.0)
    return _running(live, seq_ids, num_seqs).to(values.dtype)


def min_before(values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t]: the smallest value among the sequence's live tokens before each token; 0 where there is none.

    By doubling: log2 of the longest sequence vector steps, no loop over tokens.
    """
    lengths = seq_lengths(seq_ids, num_seqs)
    smallest = torch.full_like(values, torch.inf, requires_grad=False)
    found = torch.where(mask, values.detach(), torch.inf)
    smallest[1:] = torch.where(seq_ids[1:] == seq_ids[:-1], found[:-1], torch.inf)
    longest, step = int(lengths.max()) if num_seqs else 0, 1
    while step < longest:
        earlier = torch.where(seq_ids[step:] == seq_ids[:-step], smallest[:-step], torch.inf)
        smallest = torch.cat([smallest[:step], torch.minimum(smallest[step:], earlier)])
        step *= 2
    return torch.where(smallest == torch.inf, 0.0, smallest)


def _running(live: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    lengths = seq_lengths(seq_ids, num_seqs)
    total = live.cumsum(0)
    starts = (lengths.cumsum(0) - lengths).clamp(max=max(len(live) - 1, 0))
    if not len(live):
        return total
    before = total[starts] - live[starts]
    return total - before[seq_ids]
