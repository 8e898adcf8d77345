"""Masked importance sampling (Liu, Li et al. 2025): keep the ratio inside a band, drop what is outside."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moerl.algorithms.checks import check_above, check_choice, check_range
from moerl.algorithms.mismatch import (
    MISMATCH_NEEDS,
    CorrectionConfig,
    TokenCorrection,
    check_level,
    log_mismatch,
)
from moerl.algorithms.registries import corrections
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class MisConfig(CorrectionConfig):
    """Band of u = train / rollout."""

    level: str = "token"
    """`token`, `seq` or `geo`."""
    min: float = 0.0
    max: float = 2.0
    weight: str = "ratio"
    """`ratio`: u inside the band; `one`: pure rejection (a survey's form)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_level(self.level)
        check_choice("correction.weight", self.weight, ("ratio", "one"))
        check_range("correction.min", self.min, 0.0)
        check_above("correction.max", self.max, self.min)


@corrections.register("mis", MisConfig, needs=MISMATCH_NEEDS, weighs=True)
def mis(x: LossInputs, cfg: MisConfig) -> TokenCorrection:
    """w = u or 1, k = [min <= u <= max]."""
    u = log_mismatch(x, cfg.level).exp()
    weight = u if cfg.weight == "ratio" else torch.ones_like(u)
    return TokenCorrection(weight, (u >= cfg.min) & (u <= cfg.max))
