"""GMPO's clip (arXiv 2507.20673): per token, in log space, before the geometric mean; one-sided by the sign of A."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_range
from moerl.algorithms.elementwise import zero_where
from moerl.algorithms.ratio import LOG_RATIO_LIMIT, clamp_log_ratio
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.segments import masked_seq_means, seq_lengths, spread
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


def _always(cfg: LogClipConfig) -> bool:
    return True


@trust_regions.register("log_clip", LogClipConfig, form="ratio", has_slope=_always)
def log_clip(log_ratio: Tensor, x: LossInputs, cfg: LogClipConfig) -> TokenLoss:
    """-A exp(mean of clipped token log-ratios); `x.router_shift`, where it is left, multiplies after the clip."""
    held, above, below, moved = hold_by_sign(log_ratio, x.advantages, -cfg.lo, cfg.hi)
    if "router_shift" in x.optional:
        held = held + x.router_shift.log()
    lengths = seq_lengths(x.seq_ids, x.num_seqs)
    means, counts = masked_seq_means(held, x.mask, x.seq_ids, lengths)
    loss = spread(clamp_log_ratio(means).exp(), x.seq_ids, lengths) * x.advantages.neg()
    beyond = (means.detach().abs() > LOG_RATIO_LIMIT).to(loss.dtype)
    slope = zero_where(moved, loss).mul_(spread((1 - beyond) / counts, x.seq_ids, lengths))
    metrics = {"pg/clip_low": below, "pg/clip_high": above, "pg/clamped": spread(beyond, x.seq_ids, lengths)}
    return TokenLoss(loss, metrics, slope=slope, is_shared=True)
