"""Advantages as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.advantage.reward_table import RewardTable
from moerl.algorithms.registries import advantage_transforms


@dataclass(frozen=True)
class IdentityConfig:
    """No arguments."""


@advantage_transforms.register("identity", IdentityConfig)
def identity(table: RewardTable, cfg: IdentityConfig) -> Tensor:
    """(R - center) / (scale + eps)."""
    return table.standardize(table.rewards)
