"""Punish repeated n-grams of token ids (arXiv 2502.03373)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.algorithms.checks import check_range
from moerl.algorithms.registries import shapings
from moerl.types import RolloutGroup


@dataclass(frozen=True)
class RepetitionConfig:
    """Size of the n-grams, and the penalty if all were the same."""

    n: int = 3
    penalty: float = -1.0

    def __post_init__(self) -> None:
        check_range("shaping.n", self.n, 1)
        check_range("shaping.penalty", self.penalty, -np.inf, 0.0)


def repetition_penalty(token_ids: np.ndarray, cfg: RepetitionConfig) -> float:
    """penalty * (1 - distinct / all n-grams); 0 for fewer than n tokens."""
    if len(token_ids) < cfg.n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(token_ids, cfg.n)
    return cfg.penalty * (1.0 - len(np.unique(grams, axis=0)) / len(grams))


@shapings.register("repetition", RepetitionConfig)
def repetition(group: RolloutGroup, cfg: RepetitionConfig) -> np.ndarray:
    """By the sampled tokens of each trajectory."""
    return np.array([repetition_penalty(item.token_ids[item.loss_mask], cfg) for item in group.trajectories])
