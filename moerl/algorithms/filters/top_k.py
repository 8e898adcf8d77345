"""Rejection sampling: train on the best answers of every group alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.algorithms.checks import check_range
from moerl.algorithms.registries import filters
from moerl.types import RolloutGroup


@dataclass(frozen=True)
class TopKConfig:
    """How many."""

    k: int = 1
    exclude_from_stats: bool = False
    """The others' rewards do not enter the group's statistics either."""

    def __post_init__(self) -> None:
        check_range("filter.k", self.k, 1)


@filters.register("top_k", TopKConfig, acts_on="members")
def top_k(group: RolloutGroup, cfg: TopKConfig) -> np.ndarray:
    """The k best task rewards, the first of those that tie; unscored answers are never among them."""
    rewards = np.array([trajectory.reward for trajectory in group.trajectories])
    scored = np.isfinite(rewards)
    order = np.argsort(-np.where(scored, rewards, -np.inf), kind="stable")
    kept = np.zeros(len(rewards), dtype=bool)
    kept[order[: cfg.k]] = True
    return kept & scored
