"""Punish length: in proportion to the budget, or relative to the other answers of the group (arXiv 2501.12599)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.algorithms.checks import check_choice, check_range, check_tokens
from moerl.algorithms.registries import shapings
from moerl.types import RolloutGroup


@dataclass(frozen=True)
class LengthConfig:
    """Lengths in sampled tokens."""

    max_tokens: int = 0
    """`${rollout.max_new_tokens}`; only for the linear form."""
    coefficient: float = 0.1
    form: str = "linear"
    """`linear`: -coefficient * length / max_tokens; `group`: coefficient * (0.5 - (length - shortest) / (longest -
    shortest)), and never a bonus for an answer whose task reward is at most `threshold`."""
    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_choice("shaping.form", self.form, ("linear", "group"))
        check_range("shaping.coefficient", self.coefficient, 0.0)
        if self.form == "linear":
            check_tokens("shaping.max_tokens", self.max_tokens, "${rollout.max_new_tokens}")


def relative_length_bonus(lengths: np.ndarray, is_good: np.ndarray) -> np.ndarray:
    """[g] float64 in [-0.5, 0.5]; 0 everywhere where all answers have one length."""
    spread = lengths.max() - lengths.min() if len(lengths) else 0
    if not spread:
        return np.zeros(len(lengths))
    bonus = 0.5 - (lengths - lengths.min()) / spread
    return np.where(is_good, bonus, np.minimum(bonus, 0.0))


@shapings.register("length", LengthConfig)
def length(group: RolloutGroup, cfg: LengthConfig) -> np.ndarray:
    """By the number of sampled tokens."""
    lengths = np.array([trajectory.response_length for trajectory in group.trajectories], dtype=np.float64)
    if cfg.form == "linear":
        return -cfg.coefficient * lengths / cfg.max_tokens
    rewards = np.array([trajectory.reward for trajectory in group.trajectories])
    played = np.array([trajectory.is_scored for trajectory in group.trajectories], dtype=bool)
    bonus = np.zeros(len(lengths))  # an episode that failed is no measure of length
    bonus[played] = relative_length_bonus(lengths[played], rewards[played] > cfg.threshold)
    return cfg.coefficient * bonus
