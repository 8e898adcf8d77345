"""Batches and stop-watch that both sides of the objective benchmark share; needs torch and nothing else."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

METHODS = ("grpo", "gspo", "gmpo", "cispo", "dapo_tis")
BOUNDS = {"grpo": (0.2, 0.2), "gspo": (3e-3, 4e-3), "gmpo": (0.4, 0.4), "cispo": (0.0, 1.28), "dapo_tis": (0.2, 0.28)}
"""Clip bounds; CISPO's are those of the weight itself."""
TIS_CAP = 2.0


@dataclass(frozen=True)
class Batch:
    """Random log-probabilities, [b, s] padded; live tokens are those under the mask."""

    lengths: Tensor
    """[b] int64."""
    mask: Tensor
    """[b, s] bool."""
    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    """[b, s] float32 each, 0 outside the mask."""
    advantages: Tensor
    """[b] float32."""
    probe: Tensor
    """[b, s] float32: a fixed direction; gradients are compared by their product with it."""


def lengths(tokens: int, layout: str) -> list[int]:
    """Lengths that sum to `tokens`.

    `eq1024`: all 1024, no padding anywhere. `ln8192`: log-normal with mean 1024 and sigma 1, truncated at 8192, one
    sequence at the maximum (as one cut-off answer is).
    """
    longest = int(layout[2:])
    if layout.startswith("eq"):
        return [longest] * (tokens // longest)
    generator = torch.Generator().manual_seed(tokens)
    made = [longest]
    while sum(made) < tokens:
        drawn = math.exp(math.log(1024) - 0.5 + float(torch.randn(1, generator=generator)))
        made.append(max(1, min(longest, int(drawn), tokens - sum(made))))
    return made


def make_batch(tokens: int, layout: str) -> Batch:
    """The same numbers for the same arguments, in every process."""
    counts = torch.tensor(lengths(tokens, layout))
    shape = (len(counts), int(counts.max()))
    mask = torch.arange(shape[1])[None] < counts[:, None]
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(shape, generator=generator) * mask
    rollout = old + 0.05 * torch.randn(shape, generator=generator) * mask
    logprobs = old + 0.1 * torch.randn(shape, generator=generator) * mask
    probe = torch.randn(shape, generator=generator)
    return Batch(counts, mask, logprobs, old, rollout, torch.randn(shape[0], generator=generator), probe)


def measure(step: Callable[[], None], reset: Callable[[], None], *, seconds: float, least: int) -> dict[str, float]:
    """Milliseconds of `step` (median, min, max of the repetitions), and the MB by which a call raises the peak RSS."""
    step()
    reset()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    extra = _status("VmHWM") - before
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < until and len(times) < 200):
        reset()
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "ms": statistics.median(times),
        "min": min(times),
        "max": max(times),
        "reps": len(times),
        "extra_mb": extra,
    }


def copy_time(tokens: int, *, repetitions: int = 20) -> float:
    """Milliseconds, fastest, of a plain copy that moves as many bytes as an objective must.

    Read once: three float32 (logprobs, old logprobs, advantages), the weights and a byte of mask; written once: the
    gradient. 21 bytes a token, half of them read and half written here.
    """
    source = torch.ones(21 * tokens // 2, dtype=torch.uint8)
    target, times = torch.empty_like(source), []
    for _ in range(repetitions):
        start = time.perf_counter()
        target.copy_(source)
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024
