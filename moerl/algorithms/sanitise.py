"""What cannot be computed with is taken out once, before any exp or product: no mask removes the NaN of 0 * inf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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


def sanitise(x: LossInputs, *, reads_rollout_logprobs: bool) -> CleanInputs:
    """Neutral values under the mask, and on tokens whose logprobs are infinite (or, of an engine, NaN).

    A NaN that the learner itself computed on a live token is left to reach the loss, so that the run stops.
    """
    dtype = torch.promote_types(x.logprobs.dtype, torch.float32)
    if _is_usable(x, reads_rollout_logprobs):
        return _as_it_is(x, dtype, reads_rollout_logprobs)
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


def _is_usable(x: LossInputs, reads_rollout_logprobs: bool) -> bool:
    """Nothing is masked and all logprobs are finite; asked on the CPU only, where the answer costs next to nothing."""
    if not len(x.mask) or not is_full(x.mask) or any(name in x.optional for name in _TOPK):
        return False
    read = [x.logprobs, *(x.optional[name] for name in _PREFIXED if name in x.optional)]
    read += [x.rollout_logprobs] if reads_rollout_logprobs else []
    return all(math.isfinite(float(values.detach().sum())) for values in read)  # a sum of finite ones that overflows
    # only takes the longer way


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
    return CleanInputs(inputs, x.mask, metrics, is_full=True)


def first_tokens(x: LossInputs, lengths: Tensor) -> LossInputs:
    """The first token of every sequence [n] without optional fields, for a term that reads the advantage alone.

    Sequences without tokens get some token of their neighbours: nothing is weighed by it.
    """
    at = (lengths.cumsum(0) - lengths).clamp(max=len(x.seq_ids) - 1)
    return dataclasses.replace(
        x,
        logprobs=x.logprobs.index_select(0, at),
        rollout_logprobs=x.rollout_logprobs.index_select(0, at),
        advantages=x.advantages.index_select(0, at),
        mask=x.mask.index_select(0, at),
        weights=TokenWeights.shared(x.weights.policy.index_select(0, at)),
        seq_ids=torch.arange(len(at), device=at.device),
        num_seqs=len(at),
        optional={},
    )


def _clean_weights(weights: TokenWeights, live: Tensor, dtype: torch.dtype) -> TokenWeights:
    """Terms that share a tensor go on sharing it."""
    terms = (weights.policy, weights.kl, weights.entropy, weights.value, weights.nll)
    cleaned = {id(values): torch.where(live, values.detach().to(dtype), 0) for values in terms}
    return TokenWeights(*(cleaned[id(values)] for values in terms))
