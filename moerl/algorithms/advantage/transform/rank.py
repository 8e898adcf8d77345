"""GOPO's ordinal advantages (arXiv 2602.03876): the rank within the group, best first, in place of the reward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.advantage.reward_table import RewardTable
from moerl.algorithms.checks import check_above, check_choice
from moerl.algorithms.registries import advantage_transforms


@dataclass(frozen=True)
class RankConfig:
    """Best gets +range, worst -range; center and scale are not used."""

    range: float = 2.0
    ties: str = "average"
    """`average` rank, or `ordinal` by position (the authors' code: equal answers get different advantages)."""

    def __post_init__(self) -> None:
        check_above("transform.range", self.range, 0.0)
        check_choice("transform.ties", self.ties, ("average", "ordinal"))


def _ranks(rewards: Tensor, ties: str) -> Tensor:
    """Ranks [g] from 1, the best first."""
    if ties == "ordinal":
        order = rewards.argsort(descending=True, stable=True)
        return torch.empty_like(rewards).scatter(0, order, torch.arange(1, len(rewards) + 1, dtype=rewards.dtype))
    above = (rewards.unsqueeze(0) > rewards.unsqueeze(1)).sum(1)
    equal = (rewards.unsqueeze(0) == rewards.unsqueeze(1)).sum(1)
    return above + (equal.to(rewards.dtype) + 1) / 2


@advantage_transforms.register("rank", RankConfig)
def rank(table: RewardTable, cfg: RankConfig) -> Tensor:
    """range - 2 range (rank - 1) / (G - 1); 0 for a group of one or of equal rewards."""
    result = torch.zeros_like(table.rewards)
    flat = table.flat_groups(table.rewards)
    for group in range(table.num_groups):
        if flat[group]:
            continue
        rows = ((table.groups == group) & table.scored).nonzero().squeeze(1)
        position = (_ranks(table.rewards[rows], cfg.ties) - 1) / (len(rows) - 1)
        result[rows] = cfg.range * (1 - 2 * position)
    return result
