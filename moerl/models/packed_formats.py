"""Weights of four bits: MXFP4 (gpt-oss) and the signed integers of compressed-tensors (Kimi-K2-Thinking)."""

from __future__ import annotations

import torch
from torch import Tensor

MXFP4_GROUP = 32
"""Values that share a scale; two are in a byte."""
INT4_PER_WORD = 8
_INT4_OFFSET = 8
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantise_mxfp4(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """uint8 [rows, g, 16] and exponents uint8 [rows, g] -> [rows, 32 g]; the low half of a byte comes first.

    Exponent 255 is the format's NaN, and so are its values.
    """
    table = torch.tensor(_MXFP4_VALUES, dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([table[byte & 15], table[byte >> 4]], dim=1).view(torch.int32).flatten()  # both in one word
    values = pairs.index_select(0, blocks.reshape(-1).int()).view(torch.bfloat16)
    factors = scales.contiguous().view(torch.float8_e8m0fnu).to(torch.bfloat16)
    scaled = values.view(*blocks.shape[:2], MXFP4_GROUP).mul_(factors[..., None])  # powers of two: exact in bfloat16
    return scaled.flatten(1).to(dtype)


def dequantise_int4(packed: Tensor, scale: Tensor, columns: int, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """int32 words [m, ceil(n / 8)], lowest half byte first, and scales [m, groups] -> [m, n]; 0 is stored as 8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = ((packed[..., None] >> shifts) & 15).flatten(1)[:, :columns].float() - _INT4_OFFSET
    grouped = values.unflatten(1, (scale.shape[1], -1))
    return grouped.mul_(scale.float()[..., None]).flatten(1).to(dtype)
