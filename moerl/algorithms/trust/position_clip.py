"""CTPO's position-adaptive clip (arXiv 2605.07331): bounds of the log-ratio that grow with the token's position."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.prefixes import positions
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.surrogate import clipped_surrogate
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class PositionClipConfig:
    """Bounds of the first token's log-ratio (of the authors' script), and how they grow."""

    lo: float = 0.025
    hi: float = 0.05
    power: float = 0.5
    """Both bounds times position ** power; 0 holds them."""

    def __post_init__(self) -> None:
        check_above("trust.lo", self.lo, 0.0)
        check_above("trust.hi", self.hi, 0.0)
        check_range("trust.power", self.power, -1.0, 1.0)


@trust_regions.register("position_clip", PositionClipConfig, form="ratio")
def position_clip(log_ratio: Tensor, x: LossInputs, cfg: PositionClipConfig) -> TokenLoss:
    """-min(x A, clip(x, exp(-lo t^power), exp(hi t^power)) A), t the live token's position from 1."""
    scale = positions(x.mask, x.seq_ids, x.num_seqs).clamp(min=1).to(log_ratio.dtype) ** cfg.power
    return clipped_surrogate(log_ratio.exp(), x.advantages, ((-cfg.lo * scale).exp(), (cfg.hi * scale).exp()))
