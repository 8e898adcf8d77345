"""DCPO's dynamic adaptive clip (arXiv 2509.02333): rare tokens get a wider region."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.surrogate import clipped_surrogate
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class DynClipConfig:
    """Bounds of the squared change of probability mass."""

    lo: float = 0.16
    hi: float = 0.2
    max: float = 10.0
    """Ceiling of the upper bound."""
    dual_c: float = 10.0

    def __post_init__(self) -> None:
        check_range("trust.lo", self.lo, 0.0)
        check_range("trust.hi", self.hi, 0.0)
        check_above("trust.max", self.max, 1.0)
        check_above("trust.dual_c", self.dual_c, 1.0)


def dynamic_bounds(old_logprobs: Tensor, cfg: DynClipConfig) -> tuple[Tensor, Tensor]:
    """Lower and upper bound [t] of the ratio; 0.5 and `cfg.max` where the old probability underflows."""
    probs = old_logprobs.detach().exp()
    low = 0.5 + 0.5 * (1 - 4 * cfg.lo / probs).clamp(min=0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * cfg.hi / probs).sqrt()
    return low, torch.clamp(high, max=cfg.max)


@trust_regions.register("dyn_clip", DynClipConfig, form="ratio", needs=("old_logprobs",))
def dyn_clip(log_ratio: Tensor, x: LossInputs, cfg: DynClipConfig) -> TokenLoss:
    """PPO's surrogate with bounds per token."""
    return clipped_surrogate(log_ratio.exp(), x.advantages, dynamic_bounds(x.old_logprobs, cfg), dual_c=cfg.dual_c)
