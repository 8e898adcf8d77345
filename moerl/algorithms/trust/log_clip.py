"""GMPO's clip (arXiv 2507.20673): per token, in log space, before the geometric mean; one-sided by the sign of A."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_range
from moerl.algorithms.ratio import LOG_RATIO_LIMIT, clamp_log_ratio
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.segments import masked_seq_mean
from moerl.algorithms.surrogate import hold_by_sign
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class LogClipConfig:
    """Bounds of the token log-ratio."""

    lo: float = 0.4
    hi: float = 0.4

    def __post_init__(self) -> None:
        check_range("trust.lo", self.lo, 0.0)
        check_range("trust.hi", self.hi, 0.0)


@trust_regions.register("log_clip", LogClipConfig, form="ratio")
def log_clip(log_ratio: Tensor, x: LossInputs, cfg: LogClipConfig) -> TokenLoss:
    """-A exp(mean of clipped token log-ratios); `x.router_shift`, where it is left, multiplies after the clip."""
    held, moved = hold_by_sign(log_ratio, x.advantages, -cfg.lo, cfg.hi)
    if "router_shift" in x.optional:
        held = held + x.router_shift.log()
    mean = masked_seq_mean(held, x.mask, x.seq_ids, x.num_seqs)
    metrics = {"pg/clip_low": moved.clamp(min=0), "pg/clip_high": moved.neg().clamp_(min=0)}
    metrics["pg/clamped"] = mean.detach().abs() > LOG_RATIO_LIMIT
    return TokenLoss(clamp_log_ratio(mean).exp() * x.advantages.neg(), metrics)
