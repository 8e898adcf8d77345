"""PPO's clip (arXiv 1707.06347), clip-higher (DAPO), dual clip (arXiv 1912.09729), delta (arXiv 2505.07291)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.elementwise import exp
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.surrogate import clip_once, clipped_surrogate
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class ClipConfig:
    """The ratio is held within [1 - lo, 1 + hi]."""

    lo: float = 0.2
    hi: float = 0.2
    dual_c: float | None = None
    """Ceiling of the ratio where A < 0; 3.0 is usual."""
    delta: float | None = None
    """Ceiling of the ratio in the unclipped branch; 4.0 in INTELLECT-2."""

    def __post_init__(self) -> None:
        check_range("trust.lo", self.lo, 0.0, 1.0)
        check_range("trust.hi", self.hi, 0.0)
        if self.dual_c is not None:
            check_above("trust.dual_c", self.dual_c, 1.0)
        if self.delta is not None:
            check_above("trust.delta", self.delta, 1.0 + self.hi)


def _clips_once(cfg: ClipConfig) -> bool:
    return cfg.dual_c is None and cfg.delta is None


@trust_regions.register("clip", ClipConfig, form="ratio", elementwise=True, has_slope=_clips_once)
def clip(log_ratio: Tensor, x: LossInputs, cfg: ClipConfig) -> TokenLoss:
    """PPO's pessimistic surrogate."""
    bounds = (1 - cfg.lo, 1 + cfg.hi)
    if _clips_once(cfg):
        return clip_once(log_ratio, x.advantages, *bounds)
    return clipped_surrogate(exp(log_ratio), x.advantages, bounds, dual_c=cfg.dual_c, delta=cfg.delta)
