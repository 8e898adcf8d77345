"""Sums over the rest of an answer, for credit that differs per token; float64, packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.segments import masked_seq_sum


def returns_to_go(rewards: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int) -> Tensor:
    """[t] -> [t] float64: sum of the live token rewards from each token to the end of its sequence; 0 outside `mask`.

    Undiscounted (REINFORCE++, arXiv 2501.03262); detached.
    """
    live = torch.where(mask, rewards.detach().double(), 0.0)
    before = live.cumsum(0) - live
    starts = torch.ones_like(mask)
    starts[1:] = seq_ids[1:] != seq_ids[:-1]
    offset = before[starts.nonzero().squeeze(1)][seq_ids.unique_consecutive(return_inverse=True)[1]]
    total = masked_seq_sum(live, mask, seq_ids, num_seqs)
    return torch.where(mask, total - (before - offset), 0.0)
