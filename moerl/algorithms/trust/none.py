"""No trust region: the plain importance-weighted policy gradient, in both forms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.registries import trust_regions
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class NoTrustConfig:
    """No arguments."""


def score_form(log_ratio: Tensor, x: LossInputs, cfg: NoTrustConfig) -> TokenLoss:
    """Gradient through the logprob alone."""
    return TokenLoss(-log_ratio.detach().exp() * x.advantages * x.logprobs)


@trust_regions.register("none", NoTrustConfig, form="any", elementwise=True, score=score_form)
def unbounded(log_ratio: Tensor, x: LossInputs, cfg: NoTrustConfig) -> TokenLoss:
    """Gradient through the ratio."""
    return TokenLoss(-log_ratio.exp() * x.advantages)
