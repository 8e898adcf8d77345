"""One token per row from a row of logits: temperature, top-k, top-p, and the row's own random number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moerl.types import SamplingParams


@dataclass(frozen=True, slots=True)
class DrawRules:
    """The numbers of `SamplingParams` that one draw needs, a row per request. All arithmetic is float64."""

    temperature: Tensor
    """[b] float64; 0 is greedy."""
    top_k: Tensor
    """[b] int64; the vocabulary size where off."""
    top_p: Tensor
    """[b] float64."""
    limits: bool
    """Whether any row has a top-k or top-p."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> DrawRules:
        """Rows in the order of `params`."""
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float64),
            torch.tensor(top_k),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            any(has_limits(p, vocab_size) for p in params),
        )

    def rows(self, keep: Tensor) -> DrawRules:
        """The rules of rows `keep` [b'] int64 only."""
        return DrawRules(self.temperature[keep], self.top_k[keep], self.top_p[keep], self.limits)


def has_limits(params: SamplingParams, vocab_size: int) -> bool:
    """Whether top-k or top-p can leave a token out: only then a completion carries its support."""
    return params.temperature > 0 and (params.top_p < 1.0 or 0 < params.top_k < vocab_size)


def draw(logits: Tensor, uniforms: Tensor, rules: DrawRules) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw by inverting the cumulative distribution in token-id order, so one uniform number decides one token.

    top-k comes first; top-p then keeps the smallest set of most probable tokens whose probability, renormalised after
    top-k, reaches it. Equal probabilities are ranked by token id.

    Args:
        logits: [b, v] float32.
        uniforms: [b] float64 in [0, 1).
        rules: [b] rows.

    Returns:
        tokens [b] int64; their logprobs [b] float64 under the distribution that was sampled (0 for greedy rows: a point
        mass); allowed [b, v] bool where some row has a limit, else None.
    """
    greedy = rules.temperature == 0
    scaled = logits.double() / torch.where(greedy, 1.0, rules.temperature)[:, None]
    probs = scaled.softmax(-1)
    allowed = _allowed(probs, rules) if rules.limits else None
    if allowed is not None:
        probs = probs * allowed
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # The first token whose cumulative passes u * total. u is at most 1 - 2**-53, so even rounded the product is below
    # total, and a token of probability 0 passes nothing.
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    logprobs = (probs.gather(-1, tokens[:, None]) / total)[:, 0].log()
    return tokens, torch.where(greedy, 0.0, logprobs), allowed


def likeliest(logits: Tensor, rules: DrawRules, allowed: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The tokens that `draw` was most likely to take.

    Args:
        logits: [b, v] float32.
        rules: [b] rows.
        allowed: [b, v] bool, as `draw` returned it.
        count: how many.

    Returns:
        ids [b, count] int64, the likeliest first, and their logprobs [b, count] float64 under the distribution that is
        sampled (greedy: a point mass); -1 and -inf where fewer tokens have a probability.
    """
    greedy = rules.temperature == 0
    scaled = logits.double() / torch.where(greedy, 1.0, rules.temperature)[:, None]
    out = torch.zeros_like(scaled, dtype=torch.bool) if allowed is None else ~allowed
    if greedy.any():
        point = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
        out = torch.where(greedy[:, None], ~point, out)
    logprobs = scaled.masked_fill(out, -torch.inf).log_softmax(-1)
    values, ids = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    missing = (0, count - values.shape[-1])
    values = torch.nn.functional.pad(values, missing, value=-torch.inf)
    return torch.nn.functional.pad(ids, missing, value=-1).masked_fill(values == -torch.inf, -1), values


def uniforms_of(seed: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1): the numbers of one request, the same whatever else is in the batch."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def _allowed(probs: Tensor, rules: DrawRules) -> Tensor:
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1])
    ranked = ranked * (rank < rules.top_k[:, None])
    before = ranked.cumsum(-1) - ranked  # probability of all better tokens
    kept = (before < rules.top_p[:, None] * ranked.sum(-1, keepdim=True)) & (ranked > 0)
    kept |= (rules.top_p[:, None] >= 1.0) & (rank < rules.top_k[:, None])
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)
