"""Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework...")."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.algorithms.checks import check_above
from moerl.algorithms.elementwise import exp, is_above
from moerl.algorithms.mismatch import (
    MISMATCH_NEEDS,
    TokenCorrection,
    TokenWeightConfig,
    all_kept,
    check_level,
    log_mismatch,
    reduce_weight,
)
from moerl.algorithms.registries import corrections
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class TisConfig(TokenWeightConfig):
    """Weight min(u, cap)."""

    level: str = "token"
    """`token`, `seq` (product, unbiased) or `geo` (another statistic)."""
    cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_level(self.level)
        check_above("correction.cap", self.cap, 0.0)


@corrections.register("tis", TisConfig, needs=MISMATCH_NEEDS, weighs=True)
def tis(x: LossInputs, cfg: TisConfig) -> TokenCorrection:
    """w = clip(u, 0, cap), k = 1."""
    u = exp(log_mismatch(x, cfg.level))
    metrics = {"mm/tis_clip": is_above(u, cfg.cap)}
    return TokenCorrection(reduce_weight(u.clamp(max=cfg.cap), x, cfg), all_kept(x), metrics)
