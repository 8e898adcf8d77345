"""MiniRL's mask (arXiv 2512.01374): PPO's clip decision on lp / lp_old, a capped importance weight to the anchor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class RatioMaskConfig:
    """Bounds of the ratio to the old policy, whatever the anchor is."""

    lo: float = 0.2
    hi: float = 0.27
    cap: float = 5.0
    """Ceiling of the importance weight."""

    def __post_init__(self) -> None:
        check_range("trust.lo", self.lo, 0.0, 1.0)
        check_range("trust.hi", self.hi, 0.0)
        check_above("trust.cap", self.cap, 1.0)


@trust_regions.register("ratio_mask", RatioMaskConfig, form="score", needs=("old_logprobs",))
def ratio_mask(log_ratio: Tensor, x: LossInputs, cfg: RatioMaskConfig) -> TokenLoss:
    """-sg[M min(ratio, cap)] A lp."""
    moved = (x.logprobs.detach() - x.old_logprobs).exp()
    high = (x.advantages > 0) & (moved > 1 + cfg.hi)
    low = (x.advantages < 0) & (moved < 1 - cfg.lo)
    weight = log_ratio.detach().exp().clamp(max=cfg.cap) * ~(high | low)
    return TokenLoss(-weight * x.advantages * x.logprobs, {"pg/clip_high": high, "pg/clip_low": low})
