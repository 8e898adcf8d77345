"""Several methods on one batch: where their gradients differ, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moerl.api import Evaluation

ROUNDING = 1e-6
"""Of the largest gradient: what is closer than this is the same number, computed in another order."""


@dataclass(frozen=True)
class TokenGap:
    """One token on which the methods disagree."""

    sequence: int
    position: int
    """Within the sequence, counting the tokens that the batch holds."""
    token_id: int | None
    log_ratio: float
    """log(current / old)."""
    advantages: Mapping[str, float]
    gradients: Mapping[str, float]
    """d loss / d logprob by method."""


@dataclass(frozen=True)
class Comparison:
    """Numbers of every method, and the tokens that tell them apart."""

    figures: Mapping[str, Mapping[str, float | None]]
    """method -> name -> value: those of `summarise`, and `cosine` (None where a gradient is all zero) and
    `tokens_differ` against the first method."""
    gaps: tuple[TokenGap, ...]
    """Largest first."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"methods": self.figures, "tokens": [vars(gap) for gap in self.gaps]}


def summarise(result: Evaluation) -> dict[str, float]:
    """Loss, norm and reach of the gradient, then every metric by name."""
    mask, gradient = result.batch.mask, _packed_gradient(result)[result.batch.mask]
    return {
        "loss": float(result.loss.detach()),
        "gradient_norm": result.gradient_norm,
        "tokens": float(mask.sum()),
        "zero_gradient_fraction": float((gradient == 0).double().mean()) if len(gradient) else 0.0,
        **dict(sorted(result.metrics.items())),
    }


def compare(results: Mapping[str, Evaluation], *, num_tokens: int = 10) -> Comparison:
    """Compare evaluations of the same batch; the first method is what the others are held against.

    Gradients are compared as they are, for they all speak of the same log-probabilities; a method that only takes
    longer steps in the same direction has cosine 1.
    """
    names = list(results)
    first = results[names[0]]
    gradients = {name: _packed_gradient(result).double() for name, result in results.items()}
    base = gradients[names[0]]
    figures: dict[str, dict[str, float | None]] = {}
    for name, result in results.items():
        differ = (gradients[name] - base).abs() > ROUNDING * torch.maximum(
            base.abs().max(), gradients[name].abs().max()
        )
        figures[name] = {
            **summarise(result),
            "cosine": _cosine(gradients[name], base),
            "tokens_differ": float(differ.sum()),
        }
    stacked = torch.stack([gradients[name] for name in names])
    spread = stacked.amax(0) - stacked.amin(0)
    order = torch.argsort(spread, descending=True, stable=True)[:num_tokens]
    chosen = [int(index) for index in order if spread[index] > ROUNDING * stacked.abs().max()]
    return Comparison(figures, tuple(_gap(first, index, results, gradients) for index in chosen))


def _gap(first: Evaluation, index: int, results: Mapping[str, Evaluation], gradients: Mapping[str, Tensor]) -> TokenGap:
    batch = first.batch
    sequence = int(batch.seq_ids[index])
    now, ids = batch.logprobs.detach(), batch.columns.get("token_ids")
    old = batch.columns.get("old_logprobs", now)
    return TokenGap(
        sequence=sequence,
        position=index - int((batch.seq_ids < sequence).sum()),
        token_id=None if ids is None else int(ids[index]),
        log_ratio=float(now[index] - old[index]),
        advantages={name: float(_packed(result, result.advantages)[index]) for name, result in results.items()},
        gradients={name: float(values[index]) for name, values in gradients.items()},
    )


def _packed_gradient(result: Evaluation) -> Tensor:
    return _packed(result, result.gradient)


def _packed(result: Evaluation, values: Tensor) -> Tensor:
    return values if result.batch.slots is None else values[result.batch.slots]


def _cosine(a: Tensor, b: Tensor) -> float | None:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else None
