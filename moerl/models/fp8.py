"""FP8 with scales per block: the arithmetic, in float32 strips, without a whole float32 copy of a tensor.

A block is (rows, columns); the last ones of a tensor may be partial, so row i always belongs to block i // rows. A
scale multiplies, whatever its name says: weight = float8 * scale. Per channel is the block (1, columns), per tensor the
block (rows, columns).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from moerl.errors import CheckpointError

E4M3_MAX = 448.0
BLOCK = (128, 128)
"""Rows and columns, as the hub's FP8 folders have them."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_STRIP_ELEMENTS = 1 << 20
"""Of a float32 working copy: 4 MiB, which stays in a processor's cache from one pass to the next."""
_NAN_CODE = 0x7F
"""Of float8_e4m3fn, without its sign."""

ScaleFormat = Literal["fp32", "ue8m0"]


def scale_shape(rows: int, columns: int, block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """Blocks of a matrix, partial ones included."""
    return -(-rows // block[0]), -(-columns // block[1])


def quantise_fp8_block(
    tensor: Tensor, block: tuple[int, int] = BLOCK, *, scale_format: ScaleFormat = "fp32"
) -> tuple[Tensor, Tensor]:
    """(weight float8_e4m3fn [m, n], scale float32 [ceil(m / rows), ceil(n / columns)]) of a matrix.

    A block's scale is its largest magnitude / 448, and 1 where all of it is 0; `ue8m0` rounds it up to a power of two
    before dividing, so that it fits the exponent alone.

    Raises:
        CheckpointError: not a matrix of floats, or a value that is not finite.
    """
    if tensor.dim() != 2 or not tensor.is_floating_point() or tensor.element_size() == 1:
        raise CheckpointError(
            f"a tensor of dtype {tensor.dtype} and shape {list(tensor.shape)} cannot be written as FP8 blocks; "
            "only matrices of 16 to 64 bit floats can"
        )
    rows, columns = tensor.shape
    weight = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    scale = torch.ones(scale_shape(rows, columns, block), dtype=torch.float32, device=tensor.device)
    for start, stop in _strips(rows, columns, block[0]):
        values = tensor[start:stop].to(torch.float32, copy=True)  # `float()` of float32 is the tensor itself
        largest = _largest(values, block)
        if not bool(torch.isfinite(largest).all()):
            raise CheckpointError("a value is not finite (NaN or infinite), and FP8 blocks have no scale for it")
        own = _scales(largest, scale_format)
        scale[start // block[0] : start // block[0] + own.shape[0]] = own
        _over_blocks(values, own, block, 0, divide=True)
        weight[start:stop] = values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return weight, scale


def dequantise_fp8(
    weight: Tensor, scale: Tensor, block: tuple[int, int], *, dtype: torch.dtype = torch.bfloat16, first_row: int = 0
) -> Tensor:
    """float8 rows of a matrix [m, n] and the scales of the whole matrix -> values in `dtype`, rounded once.

    `first_row`: number of the first of these rows in the matrix.
    """
    rows, columns = weight.shape
    scale = scale.float()
    out = torch.empty_like(weight, dtype=dtype)
    for start, stop in _strips(rows, columns, 1):
        values = e4m3_to_float(weight[start:stop])
        _over_blocks(values, scale, block, first_row + start, divide=False)
        out[start:stop] = values
    return out


def e4m3_to_float(weight: Tensor) -> Tensor:
    """float8_e4m3fn -> the same values in float32, several times faster than torch's own cast of single elements.

    With its exponent and mantissa moved up by 7 bits a code is the float16 of 1/256 of its value, subnormal or not.
    Only NaN has another code there.
    """
    codes = weight.contiguous().view(torch.int8)
    halves = (codes.to(torch.int16) << 7).bitwise_and_(~0x4000)  # the sign came twice
    values = halves.view(torch.float16).float().mul_(256.0)
    magnitudes = codes & _NAN_CODE
    has_nan = bool(magnitudes.numel()) and int(magnitudes.amax()) == _NAN_CODE
    return values.masked_fill_(magnitudes == _NAN_CODE, torch.nan) if has_nan else values


def _scales(largest: Tensor, scale_format: ScaleFormat) -> Tensor:
    scale = (largest / E4M3_MAX).clamp_(min=SMALLEST_SCALE)
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1), 0.5 for powers of two
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(largest > 0, scale, torch.ones_like(scale))


def _largest(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block; NaN where it holds one."""
    rows, columns = values.shape
    tall, wide = scale_shape(rows, columns, block)
    padded = values.abs()
    if (rows, columns) != (tall * block[0], wide * block[1]):
        padded = torch.nn.functional.pad(padded, (0, wide * block[1] - columns, 0, tall * block[0] - rows))
    return padded.view(tall, block[0], wide, block[1]).amax(dim=(1, 3))


def _over_blocks(values: Tensor, scale: Tensor, block: tuple[int, int], first_row: int, *, divide: bool) -> None:
    """Multiply or divide in place by the scale of each element's block."""
    rows, columns = values.shape
    own = scale[(first_row + torch.arange(rows, device=values.device)) // block[0]]
    full = columns // block[1]
    apply = Tensor.div_ if divide else Tensor.mul_
    if full:
        apply(values[:, : full * block[1]].unflatten(1, (full, block[1])), own[:, :full, None])
    if columns % block[1]:
        apply(values[:, full * block[1] :], own[:, full:])


def _strips(rows: int, columns: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Rows of about a working copy each, cut between blocks."""
    step = max(1, _STRIP_ELEMENTS // max(1, columns) // multiple) * multiple
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
