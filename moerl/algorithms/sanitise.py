"""What cannot be computed with is taken out once, before any exp or product: no mask removes the NaN of 0 * inf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.elementwise import total
from moerl.algorithms.segments import is_full
from moerl.algorithms.types import LossInputs
from moerl.metrics import Metrics, Sum
from moerl.types import TokenWeights

_PREFIXED = ("old_logprobs", "ref_logprobs", "teacher_logprobs")
_CONSTANTS = ("old_entropy", "old_values", "returns")
_WITH_GRADIENT = ("entropy", "values")
_TOPK = ("topk_logprobs", "rollout_topk")


@dataclass(frozen=True)
class CleanInputs:
    """Inputs in which every token may be computed with."""

    inputs: LossInputs
    """Detached but for `logprobs`, `entropy` and `values`; `mask`: where the policy term and sequence statistics may
    look."""
    live: Tensor
    """[t] bool: tokens that train, wider than `inputs.mask` by those whose rollout logprob alone is unusable."""
    metrics: Metrics
    is_full: bool = False
    """Every token may be computed with, and trains; False where only a device could tell."""
    drift: Tensor | None = None
    """[t], with gradient: log-ratio of the current to the old policy, where all is full and that one is given."""
    total_drift: float = 0.0
    """Its sum."""


def sanitise(x: LossInputs, *, reads_rollout_logprobs: bool) -> CleanInputs:
    """Neutral values under the mask, and on tokens whose logprobs are infinite (or, of an engine, NaN).

    A NaN that the learner itself computed on a live token is left to reach the loss, so that the run stops.
    """
    dtype = torch.promote_types(x.logprobs.dtype, torch.float32)
    if len(x.mask) and is_full(x.mask) and not any(name in x.optional for name in _TOPK):
        whole = _as_it_is(x, dtype, reads_rollout_logprobs)
        if _is_usable(whole, reads_rollout_logprobs):
            return whole
    own = {"logprobs": x.logprobs, **{name: x.optional[name] for name in _PREFIXED if name in x.optional}}
    is_infinite = torch.stack([values.detach().isinf() for values in own.values()]).any(0) & x.mask
    live = x.mask & ~is_infinite
    usable = live
    metrics: Metrics = {"pg/invalid_logprobs": Sum(is_infinite.sum())}
    if reads_rollout_logprobs:
        bad_rollout = ~x.rollout_logprobs.detach().isfinite() & x.mask
        usable = live & ~bad_rollout
        metrics["mm/invalid_logprobs"] = Sum(bad_rollout.sum())
    logprobs = torch.where(live, x.logprobs.to(dtype), 0)

    def constant(values: Tensor, where: Tensor, neutral: Tensor | float) -> Tensor:
        return torch.where(where, values.detach().to(dtype), neutral)

    optional: Mapping[str, Tensor] = {
        **x.optional,
        **{name: constant(x.optional[name], live, 0) for name in _PREFIXED if name in x.optional},
    }
    if "router_shift" in x.optional:
        optional = {**optional, "router_shift": constant(x.optional["router_shift"], live, 1)}
    for name in x.optional:
        values = x.optional[name]
        if name in _CONSTANTS:
            optional = {**optional, name: constant(values, live, 0)}
        elif name in _WITH_GRADIENT:
            optional = {**optional, name: torch.where(live, values.to(dtype), 0)}
        elif name in _TOPK:
            optional = {**optional, name: constant(values, live.unsqueeze(-1), -torch.inf)}
    inputs = dataclasses.replace(
        x,
        logprobs=logprobs,
        rollout_logprobs=constant(x.rollout_logprobs, usable, logprobs.detach()),
        advantages=constant(x.advantages, live, 0),
        mask=usable,
        weights=_clean_weights(x.weights, live, dtype),
        optional=optional,
    )
    return CleanInputs(inputs, live, metrics)


def _is_usable(whole: CleanInputs, reads_rollout_logprobs: bool) -> bool:
    """All logprobs are finite; asked on the CPU only, where the answer costs next to nothing.

    A sum of finite ones that overflows only takes the longer way. The drift is finite where its two sides are.
    """
    x = whole.inputs
    read = [x.optional[name] for name in ("ref_logprobs", "teacher_logprobs") if name in x.optional]
    if whole.drift is None:
        read.append(x.logprobs)
    if reads_rollout_logprobs:
        read.append(x.rollout_logprobs)
    return math.isfinite(whole.total_drift) and all(math.isfinite(total(values)) for values in read)


def _as_it_is(x: LossInputs, dtype: torch.dtype, reads_rollout_logprobs: bool) -> CleanInputs:
    metrics: Metrics = {"pg/invalid_logprobs": Sum(0)}
    if reads_rollout_logprobs:
        metrics["mm/invalid_logprobs"] = Sum(0)
    terms = tuple(getattr(x.weights, f.name) for f in dataclasses.fields(x.weights))
    cast = {id(values): values.detach().to(dtype) for values in terms}
    optional = {
        name: values.to(dtype) if name in _WITH_GRADIENT else values.detach().to(dtype)
        for name, values in x.optional.items()
        if name in (*_PREFIXED, *_CONSTANTS, *_WITH_GRADIENT, "router_shift")
    }
    inputs = dataclasses.replace(
        x,
        logprobs=x.logprobs.to(dtype),
        rollout_logprobs=x.rollout_logprobs.detach().to(dtype),
        advantages=x.advantages.detach().to(dtype),
        weights=TokenWeights(*(cast[id(values)] for values in terms)),
        optional={**x.optional, **optional},
    )
    drift = inputs.logprobs - inputs.old_logprobs if "old_logprobs" in optional else None
    sum_of_drift = 0.0 if drift is None else total(drift)
    return CleanInputs(inputs, x.mask, metrics, is_full=True, drift=drift, total_drift=sum_of_drift)


def first_tokens(x: LossInputs, lengths: Tensor, dtype: torch.dtype) -> LossInputs:
    """One token for every sequence [n], of which the advantage alone is true, for a term that reads nothing else.

    Sequences without tokens get the advantage of a neighbour: nothing is weighed by it.
    """
    at = (lengths.cumsum(0) - lengths).clamp(max=len(x.seq_ids) - 1)
    advantages = x.advantages.detach().index_select(0, at).to(dtype)
    return LossInputs(
        logprobs=advantages,
        rollout_logprobs=advantages,
        advantages=advantages,
        mask=lengths > 0,
        weights=TokenWeights.shared(advantages),
        seq_ids=torch.arange(len(at), device=at.device),
        num_seqs=len(at),
        constants=x.constants,
    )


def _clean_weights(weights: TokenWeights, live: Tensor, dtype: torch.dtype) -> TokenWeights:
    """Terms that share a tensor go on sharing it."""
    terms = (weights.policy, weights.kl, weights.entropy, weights.value, weights.nll)
    cleaned = {id(values): torch.where(live, values.detach().to(dtype), 0) for values in terms}
    return TokenWeights(*(cleaned[id(values)] for values in terms))
