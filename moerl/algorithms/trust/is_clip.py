"""Importance-weight clip of CISPO (arXiv 2506.13585): cap the weight, keep the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_range
from moerl.algorithms.elementwise import exp, is_above, is_below, zero_where
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class IsClipConfig:
    """Absolute bounds of the importance weight."""

    min: float = 0.0
    max: float = 5.0
    mask: bool = False
    """Unified-mask form: also drop the tokens that PPO's clip would drop."""

    def __post_init__(self) -> None:
        check_range("trust.min", self.min, 0.0, 1.0)
        check_range("trust.max", self.max, 1.0)


def _always(cfg: IsClipConfig) -> bool:
    return True


@trust_regions.register("is_clip", IsClipConfig, form="score", has_slope=_always)
def is_clip(log_ratio: Tensor, x: LossInputs, cfg: IsClipConfig) -> TokenLoss:
    """-sg[clip(ratio)] A lp."""
    ratio = exp(log_ratio.detach())
    weight = ratio.clamp(cfg.min, cfg.max)
    above, below = is_above(ratio, cfg.max), is_below(ratio, cfg.min)
    if cfg.mask:
        above, below = above & (x.advantages > 0), below & (x.advantages < 0)
        weight = zero_where(above | below, weight)
    metrics = {"pg/clip_high": above, "pg/clip_low": below}
    slope = weight.mul_(x.advantages).neg_()
    return TokenLoss(slope * x.logprobs, metrics, ratio, slope)
