"""Large batches in blocks of whole sequences that stay in the processor's cache; the gradient is made in the same pass.

An objective adds up over micro-batches as it is, so a micro-batch may be cut further. On a CPU that turns the dozens of
passes over main memory into passes over the cache, and only one block's temporaries are alive at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.types import PER_SEQUENCE_FIELDS, LossInputs
from moerl.metrics import Metrics, merge_into
from moerl.types import TokenWeights

BLOCK_TOKENS = 131072
"""A float32 array of a block is 512 KiB, so that what is alive of one block lies in the last-level cache."""

Evaluate = Callable[[LossInputs], tuple[Tensor, Metrics]]

_TERMS = tuple(f.name for f in dataclasses.fields(TokenWeights))
_WITH_GRADIENT = ("entropy", "values")


def is_worth_cutting(x: LossInputs) -> bool:
    """More than a block long."""
    return len(x.logprobs) > BLOCK_TOKENS


def evaluate_in_blocks(evaluate: Evaluate, x: LossInputs) -> tuple[Tensor, Metrics]:
    """`evaluate(x)`, block by block; the loss carries the gradient to what `x` holds with gradient.

    Every per-token term must depend on its own sequence only. Fields that are not per token are left out.
    """
    metrics: Metrics = {}
    names = ["logprobs", *(name for name in _WITH_GRADIENT if name in x.optional)]
    leaves = [x.logprobs, *(x.optional[name] for name in names[1:])]
    loss = _Blocks.apply(evaluate, x, metrics, names, *leaves)
    return loss, metrics  # pyright: ignore[reportReturnType]  apply is untyped


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, evaluate: Evaluate, x: LossInputs, metrics: Metrics, names: list[str], *leaves: Tensor
    ) -> Tensor:
        wanted = ctx.needs_input_grad[4:]
        gradients = [torch.empty_like(leaf) if need else None for leaf, need in zip(leaves, wanted, strict=True)]
        total = 0.0
        for start, end in _bounds(x.seq_ids):
            parts = [leaf.detach()[start:end].requires_grad_(need) for leaf, need in zip(leaves, wanted, strict=True)]
            with torch.enable_grad():
                loss, found = evaluate(_part(x, start, end, dict(zip(names, parts, strict=True))))
            merge_into(metrics, found)
            total = total + loss.detach()
            inputs = [part for part, need in zip(parts, wanted, strict=True) if need]
            made = iter(torch.autograd.grad(loss, inputs, allow_unused=True) if inputs else ())
            for gradient in gradients:
                if gradient is not None:
                    own = next(made)
                    gradient[start:end] = 0 if own is None else own
        ctx.gradients = gradients
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
    sliced = {id(getattr(x.weights, term)): getattr(x.weights, term)[start:end] for term in _TERMS}
    optional = {name: values[start:end] for name, values in x.optional.items() if name not in PER_SEQUENCE_FIELDS}
    optional.update({name: values for name, values in leaves.items() if name in optional})
    return LossInputs(
        logprobs=leaves["logprobs"],
        rollout_logprobs=x.rollout_logprobs[start:end],
        advantages=x.advantages[start:end],
        mask=x.mask[start:end],
        weights=TokenWeights(*(sliced[id(getattr(x.weights, term))] for term in _TERMS)),
        seq_ids=x.seq_ids[start:end] - first,
        num_seqs=last - first + 1,
        constants=x.constants,
        optional=optional,
    )
