"""Punish answers that come close to their budget (DAPO's soft overlong punishment, arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.algorithms.checks import check_choice, check_range, check_tokens
from moerl.algorithms.registries import shapings
from moerl.types import RolloutGroup


@dataclass(frozen=True)
class OverlongShapingConfig:
    """Lengths in sampled tokens."""

    max_tokens: int = 0
    """`${rollout.max_new_tokens}`."""
    buffer_fraction: float = 0.2
    """Share of `max_tokens` before the end in which the punishment grows (4096 of 20480 in DAPO's run)."""
    coefficient: float = 1.0
    form: str = "soft"
    """`soft`: from 0 to -coefficient; `linear_unbounded`: goes on growing (a survey's form)."""

    def __post_init__(self) -> None:
        check_tokens("shaping.max_tokens", self.max_tokens, "${rollout.max_new_tokens}")
        check_range("shaping.buffer_fraction", self.buffer_fraction, 1e-6, 1.0)
        check_range("shaping.coefficient", self.coefficient, 0.0)
        check_choice("shaping.form", self.form, ("soft", "linear_unbounded"))


def overlong_penalty(lengths: np.ndarray, cfg: OverlongShapingConfig) -> np.ndarray:
    """[n] lengths to [n] float64 penalties, at most 0."""
    buffer_tokens = cfg.buffer_fraction * cfg.max_tokens
    excess = (lengths - (cfg.max_tokens - buffer_tokens)) / buffer_tokens
    high = 1.0 if cfg.form == "soft" else np.inf
    return -cfg.coefficient * np.clip(excess, 0.0, high)


@shapings.register("overlong", OverlongShapingConfig)
def overlong(group: RolloutGroup, cfg: OverlongShapingConfig) -> np.ndarray:
    """By the number of sampled tokens."""
    return overlong_penalty(np.array([trajectory.response_length for trajectory in group.trajectories]), cfg)
