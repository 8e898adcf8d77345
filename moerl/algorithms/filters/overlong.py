"""Take answers that ran out of budget out of the loss (DAPO's overlong filtering, arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.algorithms.registries import filters
from moerl.types import Trajectory


@dataclass(frozen=True)
class OverlongFilterConfig:
    """Whether their rewards still count for their group."""

    exclude_from_stats: bool = False


@filters.register("overlong", OverlongFilterConfig, acts_on="sample")
def overlong(trajectory: Trajectory, cfg: OverlongFilterConfig) -> bool:
    """Keep what ended by itself."""
    return trajectory.finish_reason == "stop"
