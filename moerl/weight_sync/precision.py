"""What the trainer exports -> what servers are sent: as it is, in bfloat16, or in FP8 blocks as they serve them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.errors import CheckpointError, WeightSyncError
from moerl.models.fp8 import quantise_fp8_block

SCALE = "_scale_inv"
"""What the name of a weight in FP8 blocks ends with in its scale's name."""
_WIDE = (torch.float64, torch.float32, torch.float16)


@dataclass(frozen=True)
class Precision:
    """Of every update of a run."""

    casts: bool = False
    """To bfloat16, save `kept` and `quantised`."""
    kept: frozenset[str] = frozenset()
    """Routers and their like: rounding them changes which experts a token goes to."""
    quantised: frozenset[str] = frozenset()
    """Matrices that go as float8 blocks of 128 x 128, each with its float32 scales."""

    def names(self, exported: Collection[str]) -> frozenset[str]:
        """Names that servers are sent, of those that the trainer exports."""
        return frozenset(exported) | {name + SCALE for name in self.quantised}

    def apply(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time; a scale right after its weight.

        Raises:
            WeightSyncError: a value that FP8 cannot hold; names the tensor.
        """
        for name, tensor in named:
            if name in self.quantised:
                try:
                    weight, scale = quantise_fp8_block(tensor)
                except CheckpointError as error:
                    raise WeightSyncError(f"{name}: {error}; the policy is not published") from error
                yield name, weight
                yield name + SCALE, scale
            elif self.casts and name not in self.kept and tensor.dtype in _WIDE:
                yield name, tensor.to(torch.bfloat16)
            else:
                yield name, tensor
