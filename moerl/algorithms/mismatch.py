"""What every correction of the train/rollout mismatch shares: its statistic, its result and its common arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moerl.algorithms.checks import check_choice
from moerl.algorithms.ratio import clamp_log_ratio
from moerl.algorithms.segments import masked_seq_mean, masked_seq_sum
from moerl.algorithms.types import LossInputs

MISMATCH_NEEDS = ("old_logprobs", "rollout_logprobs")


@dataclass(frozen=True)
class TokenCorrection:
    """Detached weight and keep mask of every token; both act on the policy term only."""

    weight: Tensor
    """[t] float."""
    keep: Tensor
    """[t] bool."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [t]; reduced as a mean over live tokens."""


@dataclass(frozen=True)
class RejectionConfig:
    """Arguments of every correction that can reject."""

    rejected: str = "keep_denominator"
    """`keep_denominator`: a rejected token only loses its own term; `remove`: baselines and weights are those of a
    batch without it."""

    def __post_init__(self) -> None:
        check_choice("correction.rejected", self.rejected, ("keep_denominator", "remove"))


@dataclass(frozen=True)
class CorrectionConfig(RejectionConfig):
    """Arguments of every correction that weighs."""

    batch_normalize: bool = False
    """Divide the weight by its mean over the kept tokens of the minibatch."""


@dataclass(frozen=True)
class TokenWeightConfig(CorrectionConfig):
    """Arguments of corrections whose token weights can be reduced to one per sequence."""

    w_reduce: str = "none"
    """`geo_mean`: one weight per sequence, the geometric mean of its token weights (for level geo_clip)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("correction.w_reduce", self.w_reduce, ("none", "geo_mean"))


def log_mismatch(x: LossInputs, level: str) -> Tensor:
    """log(pi_old / pi_rollout) [t] at `level`, clamped: `token`; `seq`, the product; `geo`, the geometric mean."""
    token = (x.old_logprobs - x.rollout_logprobs).detach()
    if level == "token":
        return clamp_log_ratio(token)
    reduce = masked_seq_sum if level == "seq" else masked_seq_mean
    return clamp_log_ratio(reduce(token, x.mask, x.seq_ids, x.num_seqs))


def reduce_weight(weight: Tensor, x: LossInputs, cfg: TokenWeightConfig) -> Tensor:
    """Apply `cfg.w_reduce` to token weights [t]."""
    if cfg.w_reduce == "none":
        return weight
    log_weight = weight.clamp(min=torch.finfo(weight.dtype).tiny).log()
    return masked_seq_mean(log_weight, x.mask, x.seq_ids, x.num_seqs).exp()


def all_kept(x: LossInputs) -> Tensor:
    """A keep mask [t] that keeps everything."""
    return torch.ones_like(x.mask)


def check_level(level: str) -> None:
    """Raise `ConfigError` for a level that is none of the three statistics."""
    check_choice("correction.level", level, ("token", "seq", "geo"))
