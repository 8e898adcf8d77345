"""Token weights of TIS with rejection of whole sequences by their geometric-mean ratio."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.mismatch import MISMATCH_NEEDS, TokenCorrection, TokenWeightConfig, log_mismatch, reduce_weight
from moerl.algorithms.registries import corrections
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class SeqMaskTisConfig(TokenWeightConfig):
    """Cap of the token weight, band of the sequence's geometric mean."""

    cap: float = 2.0
    min: float = 0.5
    max: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above("correction.cap", self.cap, 0.0)
        check_range("correction.min", self.min, 0.0)
        check_above("correction.max", self.max, self.min)


@corrections.register("seq_mask_tis", SeqMaskTisConfig, needs=MISMATCH_NEEDS, weighs=True)
def seq_mask_tis(x: LossInputs, cfg: SeqMaskTisConfig) -> TokenCorrection:
    """w = clip(u_token, 0, cap), k = [min <= geo <= max]."""
    u = log_mismatch(x, "token").exp()
    geo = log_mismatch(x, "geo").exp()
    weight = reduce_weight(u.clamp(max=cfg.cap), x, cfg)
    return TokenCorrection(weight, (geo >= cfg.min) & (geo <= cfg.max), {"mm/tis_clip": u > cfg.cap})
