"""Punish an answer that repeats an earlier one of its group, token for token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.algorithms.checks import check_range
from moerl.algorithms.duplicates import copies
from moerl.algorithms.registries import shapings
from moerl.types import RolloutGroup


@dataclass(frozen=True)
class DuplicatesConfig:
    """What every copy loses; the first of its kind loses nothing."""

    penalty: float = -1.0

    def __post_init__(self) -> None:
        check_range("shaping.penalty", self.penalty, -np.inf, 0.0)


@shapings.register("duplicates", DuplicatesConfig)
def duplicates(group: RolloutGroup, cfg: DuplicatesConfig) -> np.ndarray:
    """Zero for firsts, the penalty for copies."""
    return np.where(copies(group), cfg.penalty, 0.0)
