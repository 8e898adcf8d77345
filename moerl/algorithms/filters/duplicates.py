"""Do not train on an answer that repeats an earlier one of its group: mask it, or sample it anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.algorithms.checks import check_choice, check_range
from moerl.algorithms.duplicates import copies
from moerl.algorithms.registries import filters
from moerl.types import RolloutGroup


@dataclass(frozen=True)
class DuplicatesFilterConfig:
    """What becomes of copies; a penalty is the shaping of the same name."""

    mode: str = "mask"
    """`mask`: no token of a copy trains; `resample`: copies are sampled anew, and what is still a copy after `rounds`
    stays."""
    rounds: int = 2
    exclude_from_stats: bool = False
    """Masked copies do not enter the group's statistics either."""

    def __post_init__(self) -> None:
        check_choice("filter.mode", self.mode, ("mask", "resample"))
        check_range("filter.rounds", self.rounds, 1)


def _acts_on(cfg: DuplicatesFilterConfig) -> str:
    return "members" if cfg.mode == "mask" else "rollout"


@filters.register("duplicates", DuplicatesFilterConfig, acts_on=_acts_on)
def duplicates(group: RolloutGroup, cfg: DuplicatesFilterConfig) -> np.ndarray:
    """Firsts, to keep; or copies, to sample anew."""
    return ~copies(group) if cfg.mode == "mask" else copies(group)
