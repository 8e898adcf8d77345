"""One optimizer update per minibatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.registries import schedules


@dataclass(frozen=True)
class JointConfig:
    """No arguments."""


@schedules.register("joint", JointConfig, updates=1)
def joint(old_logprobs: Tensor, cfg: JointConfig) -> Tensor:
    """All tokens in the first."""
    return torch.zeros_like(old_logprobs, dtype=torch.int64)
