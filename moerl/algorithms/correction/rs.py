"""Rejection by an estimate of KL(rollout || train), per token or sequence (trust region masking, arXiv 2512.23075)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.checks import check_above, check_choice, check_range
from moerl.algorithms.mismatch import MISMATCH_NEEDS, RejectionConfig, TokenCorrection, log_mismatch
from moerl.algorithms.ratio import clamp_log_ratio
from moerl.algorithms.registries import corrections
from moerl.algorithms.segments import masked_seq_max, masked_seq_mean, masked_seq_sum
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class RsConfig(RejectionConfig):
    """Which statistic, and its bound."""

    stat: str = "seq_mean"
    """`token`, `seq_sum`, `seq_mean` or `seq_max`."""
    estimator: str = "k3"
    """`k1`: u = train / rollout must lie in [min_ratio, max_ratio]; `k2`, `k3`: the statistic at most `threshold`."""
    policy: str = "old"
    """Whose distance from the rollout policy: `old` (the start of the step) or `current` (the policy in training, as
    trust region masking has it)."""
    threshold: float = 0.05
    min_ratio: float = 0.5
    max_ratio: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("correction.stat", self.stat, ("token", "seq_sum", "seq_mean", "seq_max"))
        check_choice("correction.estimator", self.estimator, ("k1", "k2", "k3"))
        check_choice("correction.policy", self.policy, ("old", "current"))
        check_range("correction.threshold", self.threshold, 0.0)
        check_range("correction.min_ratio", self.min_ratio, 0.0, 1.0)
        check_above("correction.max_ratio", self.max_ratio, 1.0)


def _reduce(values: Tensor, x: LossInputs, stat: str) -> Tensor:
    if stat == "token":
        return values
    reduce = {"seq_sum": masked_seq_sum, "seq_mean": masked_seq_mean, "seq_max": masked_seq_max}[stat]
    return reduce(values, x.mask, x.seq_ids, x.num_seqs)


@corrections.register("rs", RsConfig, needs=MISMATCH_NEEDS, weighs=False)
def rs(x: LossInputs, cfg: RsConfig) -> TokenCorrection:
    """w = 1, k = [statistic within its bound]."""
    c = log_mismatch(x, "token")
    if cfg.policy == "current":
        c = clamp_log_ratio((x.logprobs - x.rollout_logprobs).detach())
    if cfg.estimator == "k1":
        # The maximum over a sequence looks both ways, so that one token outside the interval rejects the sequence.
        inside = (_reduce(c, x, cfg.stat).exp() <= cfg.max_ratio) & (
            _reduce(-c, x, cfg.stat).neg().exp() >= cfg.min_ratio
        )
    else:
        value = 0.5 * c.square() if cfg.estimator == "k2" else torch.expm1(c) - c
        inside = ~(_reduce(value, x, cfg.stat) > cfg.threshold)  # a NaN of the learner is kept, and stops the run
    return TokenCorrection(torch.ones_like(c), inside)
