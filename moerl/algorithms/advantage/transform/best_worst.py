"""The best and the worst answer of a group, for objectives of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.advantage.reward_table import RewardTable
from moerl.algorithms.registries import advantage_transforms


@dataclass(frozen=True)
class BestWorstConfig:
    """No arguments."""


@advantage_transforms.register("best_worst", BestWorstConfig, ranks=True)
def best_worst(table: RewardTable, cfg: BestWorstConfig) -> Tensor:
    """+1 for the first best, -1 for the first worst, 0 for the rest and for groups without spread."""
    result = torch.zeros_like(table.rewards)
    flat = table.flat_groups(table.rewards)
    for group in range(table.num_groups):
        if flat[group]:
            continue
        rows = ((table.groups == group) & table.scored).nonzero().squeeze(1)
        rewards = table.rewards[rows]
        result[rows[int((rewards == rewards.max()).nonzero()[0])]] = 1.0
        result[rows[int((rewards == rewards.min()).nonzero()[0])]] = -1.0
    return result
