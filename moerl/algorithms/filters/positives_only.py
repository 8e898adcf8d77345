"""Train on good answers alone (RAFT++, arXiv 2504.11343)."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.algorithms.registries import filters
from moerl.types import Trajectory


@dataclass(frozen=True)
class PositivesOnlyConfig:
    """What is good."""

    threshold: float = 0.0
    """Task rewards above it are."""
    exclude_from_stats: bool = False


@filters.register("positives_only", PositivesOnlyConfig, acts_on="sample")
def positives_only(trajectory: Trajectory, cfg: PositivesOnlyConfig) -> bool:
    """Keep rewards above the threshold; an unscored trajectory is not kept."""
    return trajectory.reward > cfg.threshold
