"""Take answers that ran out of budget out of the loss (DAPO's overlong filtering, arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from moerl.algorithms.registries import filters
from moerl.errors import ConfigError
from moerl.types import FinishReason, Trajectory

FINISH_REASONS = get_args(FinishReason)


@dataclass(frozen=True)
class OverlongFilterConfig:
    """Whether their rewards still count for their group."""

    exclude_from_stats: bool = False


@filters.register("overlong", OverlongFilterConfig, acts_on="sample")
def overlong(trajectory: Trajectory, cfg: OverlongFilterConfig) -> bool:
    """Keep what ended by itself.

    Raises:
        ConfigError: nobody said why the answer ended; taking that for truncated would mask every answer.
    """
    if trajectory.finish_reason not in FINISH_REASONS:
        raise ConfigError(
            f"algorithm.filters has overlong, which reads every trajectory's finish_reason, but one has "
            f"{trajectory.finish_reason!r}; let rollout.engine and the environment set it to one of "
            f"{', '.join(FINISH_REASONS)}, or take overlong out of algorithm.filters"
        )
    return trajectory.finish_reason == "stop"
