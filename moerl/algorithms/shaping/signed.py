"""Rewards of +1 and -1 in place of a verifier's 1 and 0 (Reinforce-Rej and RAFT++, arXiv 2504.11343)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.algorithms.registries import shapings
from moerl.types import RolloutGroup


@dataclass(frozen=True)
class SignedConfig:
    """What is right."""

    threshold: float = 0.0
    """Task rewards above it are +1, the others -1."""


@shapings.register("signed", SignedConfig)
def signed(group: RolloutGroup, cfg: SignedConfig) -> np.ndarray:
    """What is missing to +1 or -1; an unscored answer stays unscored."""
    rewards = np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64)
    return np.where(rewards > cfg.threshold, 1.0, -1.0) - rewards
