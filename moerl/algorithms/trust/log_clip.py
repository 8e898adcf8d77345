"""GMPO's clip (arXiv 2507.20673): per token, in log space, before the geometric mean; one-sided by the sign of A."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.checks import check_range
from moerl.algorithms.ratio import LOG_RATIO_LIMIT, clamp_log_ratio
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.segments import masked_seq_mean
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
    """-A exp(mean of clipped token log-ratios); `x.router_shift` is what multiplies after the clip: 1, or RSPO v1's."""
    high = (x.advantages > 0) & (log_ratio > cfg.hi)
    low = (x.advantages < 0) & (log_ratio < -cfg.lo)
    clipped = torch.where(high, cfg.hi, torch.where(low, -cfg.lo, log_ratio))
    mean = masked_seq_mean(clipped + x.router_shift.log(), x.mask, x.seq_ids, x.num_seqs)
    metrics = {"pg/clip_low": low, "pg/clip_high": high, "pg/clamped": mean.detach().abs() > LOG_RATIO_LIMIT}
    return TokenLoss(-clamp_log_ratio(mean).exp() * x.advantages, metrics)
