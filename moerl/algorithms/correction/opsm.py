"""Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556): drop bad answers that the policy moved away from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moerl.algorithms.checks import check_range
from moerl.algorithms.mismatch import RejectionConfig, TokenCorrection
from moerl.algorithms.registries import corrections
from moerl.algorithms.segments import masked_seq_mean
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class OpsmConfig(RejectionConfig):
    """Bound of the mean rollout-to-current log-ratio."""

    delta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("correction.delta", self.delta, 0.0)


@corrections.register("opsm", OpsmConfig, needs=("rollout_logprobs",), weighs=False, reads_current_policy=True)
def opsm(x: LossInputs, cfg: OpsmConfig) -> TokenCorrection:
    """k = 0 where A < 0 and the sequence's mean of lp_rollout - lp exceeds delta."""
    distance = masked_seq_mean(x.rollout_logprobs - x.logprobs.detach(), x.mask, x.seq_ids, x.num_seqs)
    return TokenCorrection(torch.ones_like(distance), ~((x.advantages < 0) & (distance > cfg.delta)))
