"""Total-variation mask (arXiv 2603.01365, in open-instruct's form): stop updates that move an answer further away."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moerl.algorithms.checks import check_range
from moerl.algorithms.mismatch import MISMATCH_NEEDS, RejectionConfig, TokenCorrection, log_mismatch
from moerl.algorithms.registries import corrections
from moerl.algorithms.segments import masked_seq_mean
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class VacoConfig(RejectionConfig):
    """Bound of an answer's mean absolute deviation of u = train / rollout from 1."""

    bound: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("correction.bound", self.bound, 0.0)


@corrections.register("vaco", VacoConfig, needs=MISMATCH_NEEDS, weighs=False)
def vaco(x: LossInputs, cfg: VacoConfig) -> TokenCorrection:
    """w = 1, k = 0 where A c > 0 and the answer's mean of |u - 1| exceeds the bound."""
    c = log_mismatch(x, "token")
    distance = masked_seq_mean(torch.expm1(c).abs(), x.mask, x.seq_ids, x.num_seqs)
    return TokenCorrection(torch.ones_like(c), ~((x.advantages * c > 0) & (distance > cfg.bound)))
