"""What single values may be: the words of every text field with a fixed set, and the bounds of every number.

The axes of `algorithm` are checked by `moerl/algorithms/compose.py`, where their meaning is.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CHOICES: Mapping[str, tuple[str, ...]] = {
    "run.resume": ("auto", "required", "never"),
    "model.init": ("weights", "random"),
    "parallel.context_cut": ("auto", "zigzag", "whole"),
    "parallel.dispatcher": ("alltoall", "allgather", "flex"),
    "precision.params": ("fp32", "bf16"),
    "precision.head": ("params", "fp32"),
    "precision.fp8": ("none", "delayed", "tensorwise", "blockwise", "mxfp8"),
    "precision.recompute": ("none", "selective", "full"),
    "rollout.long_tail": ("wait", "resume", "drop"),
    "data.on_long_prompt": ("skip", "refuse"),
    "optim.name": ("adam", "sgd"),
    "optim.schedule": ("constant", "linear", "cosine"),
    "weight_sync.precision": ("as_is", "bf16", "fp8_block"),
    "checkpoint.on_corrupt": ("refuse", "previous"),
    "checkpoint.export_dtype": ("fp32", "bf16"),
    "telemetry.progress": ("auto", "live", "plain", "off"),
    "telemetry.wandb.mode": ("offline", "online"),
}


@dataclass(frozen=True)
class Bounds:
    """An interval; `open_low` and `open_high` leave its ends out."""

    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """False also for NaN and infinities."""
        if not math.isfinite(value):
            return False
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"a finite number {'above' if self.open_low else 'of at least'} {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


_AT_LEAST_ONE, _AT_LEAST_ZERO, _POSITIVE = Bounds(1), Bounds(0), Bounds(0, open_low=True)
_SHARE, _BELOW_ONE, _SHARE_ABOVE_ZERO = Bounds(0, 1), Bounds(0, 1, open_high=True), Bounds(0, 1, open_low=True)

BOUNDS: Mapping[str, Bounds] = {
    "run.seed": Bounds(0, 2**32 - 1),
    "run.num_steps": _AT_LEAST_ONE,
    "run.num_threads": _AT_LEAST_ONE,
    "model.aux_loss_coefficient": _AT_LEAST_ZERO,
    "model.router_bias_update_rate": _AT_LEAST_ZERO,
    "model.attention_dropout": _BELOW_ONE,
    "model.hidden_dropout": _BELOW_ONE,
    "parallel.tensor": _AT_LEAST_ONE,
    "parallel.pipeline": _AT_LEAST_ONE,
    "parallel.virtual_pipeline": _AT_LEAST_ONE,
    "parallel.first_stage_layers": _AT_LEAST_ONE,
    "parallel.last_stage_layers": _AT_LEAST_ONE,
    "parallel.context": _AT_LEAST_ONE,
    "parallel.expert": _AT_LEAST_ONE,
    "parallel.expert_tensor": _AT_LEAST_ONE,
    "parallel.timeout_seconds": _POSITIVE,
    "parallel.silence_seconds": _POSITIVE,
    "data.max_prompt_tokens": _AT_LEAST_ONE,
    "data.refilter.every_steps": _AT_LEAST_ZERO,
    "data.refilter.low": _SHARE,
    "data.refilter.high": _SHARE,
    "data.refilter.return_after": _AT_LEAST_ONE,
    "rollout.prompts_per_step": _AT_LEAST_ONE,
    "rollout.group_size": _AT_LEAST_ONE,
    "rollout.max_new_tokens": _AT_LEAST_ONE,
    "rollout.top_p": _SHARE_ABOVE_ZERO,
    "rollout.top_k": _AT_LEAST_ZERO,
    "rollout.top_logprobs": _AT_LEAST_ONE,
    "rollout.max_staleness": _AT_LEAST_ZERO,
    "rollout.oversampling": _AT_LEAST_ONE,
    "rollout.timeout_seconds": _POSITIVE,
    "reward.num_workers": _AT_LEAST_ONE,
    "reward.timeout_seconds": _POSITIVE,
    "reward.memory_bytes": _AT_LEAST_ONE,
    "reward.max_error_fraction": _SHARE,
    "algorithm.refill_rounds": _AT_LEAST_ZERO,
    "optim.lr": _AT_LEAST_ZERO,
    "optim.min_lr_fraction": _SHARE,
    "optim.warmup_steps": _AT_LEAST_ZERO,
    "optim.constant_steps": _AT_LEAST_ZERO,
    "optim.decay_steps": _AT_LEAST_ONE,
    "optim.beta1": _BELOW_ONE,
    "optim.beta2": _BELOW_ONE,
    "optim.eps": _POSITIVE,
    "optim.weight_decay": _AT_LEAST_ZERO,
    "optim.clip_grad_norm": _AT_LEAST_ZERO,
    "batch.num_minibatches": _AT_LEAST_ONE,
    "batch.num_epochs": _AT_LEAST_ONE,
    "batch.max_tokens_per_microbatch": _AT_LEAST_ONE,
    "weight_sync.bucket_bytes": _AT_LEAST_ONE,
    "checkpoint.interval_steps": _AT_LEAST_ZERO,
    "checkpoint.keep": _AT_LEAST_ONE,
    "checkpoint.export_interval_steps": _AT_LEAST_ZERO,
    "evaluation.interval_steps": _AT_LEAST_ZERO,
    "evaluation.num_samples": _AT_LEAST_ONE,
    "evaluation.temperature": _POSITIVE,
    "telemetry.samples_per_step": _AT_LEAST_ZERO,
    "telemetry.probe_prompts": _AT_LEAST_ZERO,
    "telemetry.profile.start_step": _AT_LEAST_ONE,
    "telemetry.profile.num_steps": _AT_LEAST_ZERO,
    "telemetry.contract_tolerance": _POSITIVE,
    "telemetry.trace_max_bytes": _AT_LEAST_ZERO,
}
"""Every number outside `algorithm`; null is left to the type. `rollout.temperature` has a rule of its own."""


def choice_errors(values: Mapping[str, Any]) -> Iterator[str]:
    """Each text outside its set, with the nearest word."""
    for path, allowed in CHOICES.items():
        fault = choice_fault(path, value_at(values, path), allowed)
        if fault is not None:
            yield fault


def choice_fault(path: str, value: Any, allowed: Collection[str]) -> str | None:
    """What is wrong with `value`, with the nearest word of `allowed`; None if it is one of them."""
    if value in allowed:
        return None
    folded = {word.lower(): word for word in allowed}
    near = difflib.get_close_matches(str(value).lower(), folded, n=1)
    hint = f" (did you mean {folded[near[0]]!r}?)" if near else ""
    return f"{path} is {value!r}, but must be one of {', '.join(allowed)}{hint}"


def bound_errors(values: Mapping[str, Any]) -> Iterator[str]:
    """Each number outside its bounds, NaN and infinities included."""
    for path, bounds in BOUNDS.items():
        value = value_at(values, path)
        if value is not None and not bounds.holds(value):
            yield f"{path} is {value!r}, but must be {bounds}"


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path without list indices."""
    result: Any = values
    for part in path.split("."):
        result = result[part]
    return result
