"""Advantage reweighting of AR-Lopti (arXiv 2505.12929): likely tokens count more."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_range
from moerl.algorithms.registries import token_weights
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class ProbReweightConfig:
    """Share of the weight that follows the probability."""

    alpha: float = 0.3
    """0 is off."""

    def __post_init__(self) -> None:
        check_range("token_weight.alpha", self.alpha, 0.0, 1.0)


@token_weights.register("prob_reweight", ProbReweightConfig, needs=("old_logprobs",))
def prob_reweight(x: LossInputs, cfg: ProbReweightConfig) -> Tensor:
    """alpha p_old + 1 - alpha."""
    return cfg.alpha * x.old_logprobs.exp() + (1 - cfg.alpha)
