"""Drop groups whose task rewards are all equal: they carry no gradient (DAPO's dynamic sampling, arXiv 2503.14476)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moerl.algorithms.registries import filters
from moerl.types import RolloutGroup

_EQUAL = 1e-9


@dataclass(frozen=True)
class ZeroVarianceConfig:
    """No arguments."""


@filters.register("zero_variance", ZeroVarianceConfig, acts_on="group")
def zero_variance(group: RolloutGroup, cfg: ZeroVarianceConfig) -> str | None:
    """Looks at the task reward, before any shaping; unscored trajectories do not count."""
    rewards = [trajectory.reward for trajectory in group.trajectories if math.isfinite(trajectory.reward)]
    if not rewards:
        return "unscored"
    return None if max(rewards) - min(rewards) > _EQUAL else "zero_variance"
