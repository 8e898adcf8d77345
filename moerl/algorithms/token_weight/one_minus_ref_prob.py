"""The weight that one survey gives to Dr. GRPO: tokens that the reference finds unlikely count more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.registries import token_weights
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class OneMinusRefProbConfig:
    """No arguments."""


@token_weights.register("one_minus_ref_prob", OneMinusRefProbConfig, needs=("ref_logprobs",))
def one_minus_ref_prob(x: LossInputs, cfg: OneMinusRefProbConfig) -> Tensor:
    """1 - p_ref."""
    return -torch.expm1(x.ref_logprobs.clamp(max=0.0))
