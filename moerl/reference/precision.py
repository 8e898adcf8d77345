"""Fake quantisation of weights: a rollout engine of lower precision without its kernels, for mismatch studies."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "int8", "fp8", "int4")
"""From none to most; the share of expert slots that differ from an fp32 learner grows in this order."""

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def check_precision(precision: str) -> None:
    """Raises ConfigError unless `precision` is one of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r} is unknown to the sampler; use one of {', '.join(PRECISIONS)}")


def fake_quantise(weight: Tensor, precision: str) -> Tensor:
    """`weight` [..., out, in] as it reads after a round trip through `precision`, in float32.

    int8, fp8 (e4m3) and int4 are symmetric with one scale per output row, at which its largest magnitude is exact.
    """
    check_precision(precision)
    weight = weight.float()
    if precision == "fp32":
        return weight
    if precision == "bf16":
        return weight.bfloat16().float()
    largest = _FP8_MAX if precision == "fp8" else float(2 ** (int(precision[3:]) - 1) - 1)
    scale = weight.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * largest) / largest
    scaled = weight / scale
    if precision == "fp8":
        return scaled.to(torch.float8_e4m3fn).float() * scale
    return scaled.round() * scale
