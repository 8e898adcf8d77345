"""Punish an answer that repeats an earlier one of its group, token for token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.algorithms.checks import check_range
from moerl.algorithms.registries import shapings
from moerl.types import RolloutGroup, Trajectory


@dataclass(frozen=True)
class DuplicatesConfig:
    """What every copy loses; the first of its kind loses nothing."""

    penalty: float = -1.0

    def __post_init__(self) -> None:
        check_range("shaping.penalty", self.penalty, -np.inf, 0.0)


def _content(trajectory: Trajectory) -> bytes:
    """Sampled ids without the stop token, of which a model may have several."""
    sampled = trajectory.token_ids[trajectory.loss_mask]
    return (sampled[:-1] if trajectory.finish_reason == "stop" else sampled).tobytes()


@shapings.register("duplicates", DuplicatesConfig)
def duplicates(group: RolloutGroup, cfg: DuplicatesConfig) -> np.ndarray:
    """Zero for firsts, the penalty for copies."""
    seen: set[bytes] = set()
    result = np.zeros(len(group.trajectories))
    for index, trajectory in enumerate(group.trajectories):
        content = _content(trajectory)
        result[index] = cfg.penalty if content in seen else 0.0
        seen.add(content)
    return result
