"""Every token alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.registries import token_weights
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class OneConfig:
    """No arguments."""


@token_weights.register("one", OneConfig)
def one(x: LossInputs, cfg: OneConfig) -> Tensor:
    """1."""
    return torch.ones_like(x.advantages)
