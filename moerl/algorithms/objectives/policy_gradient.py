"""The policy gradient of the other axes; nothing replaces it."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.algorithms.registries import objectives
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class PolicyGradientConfig:
    """No arguments."""


@objectives.register("policy_gradient", PolicyGradientConfig, replaces=False)
def policy_gradient(x: LossInputs, cfg: PolicyGradientConfig) -> TokenLoss:
    """The plain score function; the objective takes the axes' own term in its place."""
    return TokenLoss(-x.advantages * x.logprobs)
