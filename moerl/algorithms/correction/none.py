"""No correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moerl.algorithms.mismatch import TokenCorrection, all_kept
from moerl.algorithms.registries import corrections
from moerl.algorithms.types import LossInputs


@dataclass(frozen=True)
class NoCorrectionConfig:
    """No arguments."""


@corrections.register("none", NoCorrectionConfig, weighs=False)
def no_correction(x: LossInputs, cfg: NoCorrectionConfig) -> TokenCorrection:
    """Weight 1, everything kept."""
    return TokenCorrection(torch.ones_like(x.logprobs, requires_grad=False), all_kept(x))
