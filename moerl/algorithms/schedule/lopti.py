"""Lopti (arXiv 2505.12929): two optimizer updates per minibatch, rare tokens first, the others with new logprobs.

Every term of the loss is restricted to the update's tokens; each token's weight stays that of the whole minibatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.registries import schedules


@dataclass(frozen=True)
class LoptiConfig:
    """Where rare ends."""

    eta: float = 0.5
    """Old probabilities below it are rare."""

    def __post_init__(self) -> None:
        check_above("schedule.eta", self.eta, 0.0)
        check_range("schedule.eta", self.eta, 0.0, 1.0)


@schedules.register("lopti", LoptiConfig, updates=2)
def lopti(old_logprobs: Tensor, cfg: LoptiConfig) -> Tensor:
    """0 where p_old < eta, else 1."""
    return (old_logprobs >= math.log(cfg.eta)).long()
