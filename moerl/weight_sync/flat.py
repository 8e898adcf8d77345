"""A bucket as one tensor of bytes, as SGLang's `flattened_bucket` has it: the tensors' bytes, one after the other.

SGLang takes each tensor out as a view, so each must begin at a multiple of its element size. Tensors are therefore laid
out by element size, largest first: whatever stands before one is a multiple of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """One tensor's place."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype_name(self) -> str:
        """Such as `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")


def laid_out(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[FlatEntry], list[Tensor]]:
    """(places, tensors in that order); the last place ends at the number of bytes."""
    ordered = sorted(tensors, key=lambda named: -named[1].element_size())
    entries, end = [], 0
    for name, tensor in ordered:
        entries.append(FlatEntry(name, tensor.dtype, tuple(tensor.shape), end, end + tensor.nbytes))
        end += tensor.nbytes
    return entries, [tensor for _, tensor in ordered]


def pack(entries: Sequence[FlatEntry], tensors: Sequence[Tensor], out: Tensor) -> None:
    """Copy each tensor to its place in `out` [at least the bytes of all] uint8, across devices too."""
    for entry, tensor in zip(entries, tensors, strict=True):
        if tensor.numel():
            place = out[entry.start : entry.stop].view(entry.dtype).view(entry.shape)
            place.copy_(tensor.detach())
