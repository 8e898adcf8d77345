"""IcePop (Ring-1T, arXiv 2510.18855): token ratios inside a wide band, the rest dropped."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.mismatch import MISMATCH_NEEDS, CorrectionConfig, TokenCorrection, log_mismatch
from moerl.algorithms.registries import corrections
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class IcepopConfig(CorrectionConfig):
    """Band of the token ratio u."""

    min: float = 0.5
    max: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("correction.min", self.min, 0.0)
        check_above("correction.max", self.max, self.min)


@corrections.register("icepop", IcepopConfig, needs=MISMATCH_NEEDS, weighs=True)
def icepop(x: LossInputs, cfg: IcepopConfig) -> TokenCorrection:
    """w = u, k = [min <= u <= max]."""
    u = log_mismatch(x, "token").exp()
    return TokenCorrection(u, (u >= cfg.min) & (u <= cfg.max))
