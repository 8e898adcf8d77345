"""VESPO's kernel of the sequence ratio (arXiv 2602.10693): W^k exp(lam (1 - W)), detached."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.checks import check_above
from moerl.algorithms.ratio import LOG_RATIO_LIMIT
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class GammaKernelConfig:
    """Shape by the sign of A."""

    k_pos: float = 2.0
    lam_pos: float = 3.0
    k_neg: float = 3.0
    lam_neg: float = 2.0

    def __post_init__(self) -> None:
        for name in ("k_pos", "lam_pos", "k_neg", "lam_neg"):
            check_above(f"trust.{name}", float(vars(self)[name]), 0.0)


def gamma_kernel_weight(log_ratio: Tensor, advantages: Tensor, cfg: GammaKernelConfig) -> Tensor:
    """phi [t], detached; 1 where the ratio is 1."""
    log_w = log_ratio.detach().clamp(math.log(1e-8), LOG_RATIO_LIMIT)
    positive = advantages >= 0
    k = torch.where(positive, cfg.k_pos, torch.full_like(log_w, cfg.k_neg))
    lam = torch.where(positive, cfg.lam_pos, torch.full_like(log_w, cfg.lam_neg))
    return (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


@trust_regions.register("gamma_kernel", GammaKernelConfig, form="score", weight_inside=True)
def gamma_kernel(log_ratio: Tensor, x: LossInputs, cfg: GammaKernelConfig) -> TokenLoss:
    """-sg[phi] A lp. A correction's token weights enter W as the sum of their logs (trait `weight_inside`)."""
    return TokenLoss(-gamma_kernel_weight(log_ratio, x.advantages, cfg) * x.advantages * x.logprobs)
