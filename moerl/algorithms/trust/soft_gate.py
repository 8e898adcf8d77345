"""SAPO's sigmoid gate (arXiv 2511.20347), and the one-sided form that a survey gives under the same name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.checks import check_above, check_choice
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class SoftGateConfig:
    """Temperatures of the gate by the sign of A."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    form: str = "two_sided"
    """`two_sided` is the paper's; `one_sided` has a gradient weight other than 1 where the policies agree."""

    def __post_init__(self) -> None:
        check_above("trust.tau_pos", self.tau_pos, 0.0)
        check_above("trust.tau_neg", self.tau_neg, 0.0)
        check_choice("trust.form", self.form, ("two_sided", "one_sided"))


@trust_regions.register("soft_gate", SoftGateConfig, form="ratio", elementwise=True)
def soft_gate(log_ratio: Tensor, x: LossInputs, cfg: SoftGateConfig) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A."""
    ratio = log_ratio.exp()
    positive = x.advantages > 0
    if cfg.form == "one_sided":
        toward = torch.where(positive, (ratio - 1) / cfg.tau_pos, (1 - ratio) / cfg.tau_neg)
        return TokenLoss(-torch.sigmoid(toward) * ratio * x.advantages)
    tau = torch.where(positive, cfg.tau_pos, torch.full_like(ratio, cfg.tau_neg))
    return TokenLoss(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * x.advantages)
