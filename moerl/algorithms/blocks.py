"""Large batches in blocks of whole sequences that stay in the processor's cache; the gradient is made in the same pass.

An objective adds up over micro-batches as it is, so a micro-batch may be cut further. On a CPU that turns the dozens of
passes over main memory into passes over the cache, and only one block's temporaries are alive at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.types import PER_SEQUENCE_FIELDS, LossInputs
from moerl.metrics import Metrics, merge_into
from moerl.types import TokenWeights

BLOCK_TOKENS = 262144
"""A float32 array of a block is 1 MiB: what is alive of one block lies in the last-level cache, and a block's hundred
calls cost little beside its passes.
"""

Evaluate = Callable[[LossInputs], tuple[Tensor, Metrics]]
Slopes = Callable[[LossInputs, Tensor | None], tuple[Tensor, Tensor, Metrics] | None]
"""-> loss, its gradient by the logprobs [t], metrics; the second argument may be used to hold the gradient."""

_TERMS = tuple(f.name for f in dataclasses.fields(TokenWeights))
_WITH_GRADIENT = ("entropy", "values")
_FEW = 16
"""Tokens of a block for each empty sequence before its first."""


def is_worth_cutting(x: LossInputs) -> bool:
    """More than a block long."""
    return len(x.logprobs) > BLOCK_TOKENS


def evaluate_in_blocks(
    evaluate: Evaluate, x: LossInputs, slopes: Slopes | None = None, *, at_once: bool = False
) -> tuple[Tensor, Metrics]:
    """`evaluate(x)`, block by block; the loss carries the gradient to what `x` holds with gradient.

    Every per-token term must depend on its own sequence only. Fields that are not per token are left out. `slopes`, of
    an objective whose gradient is that of the logprobs alone, saves a backward pass wherever it gives something; with
    `at_once`, for one that makes hardly anything as long as the batch, it is asked for the whole before the blocks.
    """
    metrics: Metrics = {}
    names = ["logprobs", *(name for name in _WITH_GRADIENT if name in x.optional)]
    leaves = [x.logprobs, *(x.optional[name] for name in names[1:])]
    loss = _Blocks.apply((evaluate, slopes, at_once), x, metrics, names, *leaves)
    return loss, metrics  # pyright: ignore[reportReturnType]  apply is untyped


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Evaluate, Slopes | None, bool],
        x: LossInputs,
        metrics: Metrics,
        names: list[str],
        *leaves: Tensor,
    ) -> Tensor:
        evaluate, slopes, at_once = how
        wanted = ctx.needs_input_grad[4:]
        whole = slopes(x, None) if slopes is not None and at_once else None
        if whole is not None:
            loss, gradient, own = whole
            metrics.update(own)
            ctx.gradients = [gradient, *[None] * (len(leaves) - 1)]
            return loss
        gradients = [torch.empty_like(leaf) if need else None for leaf, need in zip(leaves, wanted, strict=True)]
        ctx.gradients = gradients
        total = 0.0
        for start, end in _bounds(x.seq_ids):
            parts = dict(zip(names, (leaf.detach()[start:end] for leaf in leaves), strict=True))
            part = _part(x, start, end, parts)
            outs = [None if gradient is None else gradient[start:end] for gradient in gradients]
            loss, own = _by_slopes(slopes, part, outs) or _by_backward(evaluate, part, parts, outs)
            merge_into(metrics, own)
            total = total + loss
        return total if isinstance(total, Tensor) else leaves[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        scale = grads[0]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("backward through an objective in blocks a second time; evaluate it again")
        if scale != 1:
            gradients = [None if gradient is None else gradient.mul_(scale) for gradient in gradients]
        return None, None, None, None, *gradients


def _by_slopes(slopes: Slopes | None, x: LossInputs, outs: Sequence[Tensor | None]) -> tuple[Tensor, Metrics] | None:
    """Loss and metrics; the gradient of each leaf goes to `outs`, save where it is not wanted (None)."""
    if slopes is None:
        return None
    found = slopes(x, outs[0])
    if found is None:
        return None
    loss, gradient, metrics = found
    _write(outs, [gradient, *[None] * (len(outs) - 1)])
    return loss, metrics


def _by_backward(
    evaluate: Evaluate, x: LossInputs, leaves: Mapping[str, Tensor], outs: Sequence[Tensor | None]
) -> tuple[Tensor, Metrics]:
    inputs = [leaf for leaf, out in zip(leaves.values(), outs, strict=True) if out is not None]
    for leaf in inputs:
        leaf.requires_grad_()
    with torch.enable_grad():
        loss, metrics = evaluate(x)
    if inputs:
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        _write([out for out in outs if out is not None], gradients)
    return loss.detach(), metrics


def _write(outs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    for out, gradient in zip(outs, gradients, strict=True):
        if out is not None and out is not gradient:
            out.copy_(out.new_zeros(()) if gradient is None else gradient)


def _bounds(seq_ids: Tensor) -> Iterator[tuple[int, int]]:
    """Token ranges of whole sequences, of about `BLOCK_TOKENS` each (one long sequence may be more)."""
    start, size = 0, len(seq_ids)
    while start < size:
        end = start + BLOCK_TOKENS
        if end >= size:
            end = size
        else:
            cut = int(torch.searchsorted(seq_ids, seq_ids[end]))
            end = cut if cut > start else int(torch.searchsorted(seq_ids, seq_ids[end], right=True))
        yield start, end
        start = end


def _part(x: LossInputs, start: int, end: int, leaves: Mapping[str, Tensor]) -> LossInputs:
    first, last = int(x.seq_ids[start]), int(x.seq_ids[end - 1])
    if first * _FEW < end - start:
        first = 0  # that many empty sequences cost less than a pass over the ids
    sliced = {id(getattr(x.weights, term)): getattr(x.weights, term)[start:end] for term in _TERMS}
    optional = {name: values[start:end] for name, values in x.optional.items() if name not in PER_SEQUENCE_FIELDS}
    optional.update({name: values for name, values in leaves.items() if name in optional})
    return LossInputs(
        logprobs=leaves["logprobs"],
        rollout_logprobs=x.rollout_logprobs[start:end],
        advantages=x.advantages[start:end],
        mask=x.mask[start:end],
        weights=TokenWeights(*(sliced[id(getattr(x.weights, term))] for term in _TERMS)),
        seq_ids=x.seq_ids[start:end] - first if first else x.seq_ids[start:end],
        num_seqs=last - first + 1,
        constants=x.constants,
        optional=optional,
    )
