"""What an algorithm sees (`LossInputs`), a policy loss returns (`TokenLoss`), a credit rule sees (`CreditInputs`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moerl.types import TokenWeights

OPTIONAL_FIELDS = frozenset(
    {
        "old_logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "entropy",
        "old_entropy",
        "router_shift",
        "values",
        "old_values",
        "returns",
        "rewards",
        "group_ids",
        "topk_logprobs",
        "rollout_topk",
    }
)
"""Fields that are there only if some part of the objective declared them in its `needs`.

`old_logprobs`, `ref_logprobs`, `teacher_logprobs`, `entropy`, `old_entropy`, `router_shift`, `values`, `old_values`,
`returns`: [t] float;
index j of the three of the critic speaks of the state before token j. `rewards`, `group_ids`: [n].
`topk_logprobs`, `rollout_topk`: [t, k + 1] float, the current and the rollout policy on the rollout's k likeliest
tokens and the sampled one; -inf in both where the sampled token is among the k.
"""

PER_SEQUENCE_FIELDS = frozenset({"rewards", "group_ids"})
"""Those of `OPTIONAL_FIELDS` that are [n], not per token."""

OLD_PASS = "old_pass"
"""Asks `Policy.score` for old logprobs even where the first minibatch would give the same ones."""

CORRECTION_MEAN = "correction_mean"
"""Key of `LossInputs.constants`: mean correction weight over the minibatch's kept tokens (`batch_normalize`)."""
ENTROPY_THRESHOLD = "entropy_threshold"
"""Key of `LossInputs.constants`: smallest old entropy among the tokens that `top_entropy` trains."""
KL_COEFFICIENT = "kl_coefficient"
"""Key of `LossInputs.constants`: the adaptive coefficient of the KL in the loss."""
ENTROPY_COEFFICIENT = "entropy_coefficient"
"""Key of `LossInputs.constants`: the adaptive coefficient of the entropy in the loss."""


@dataclass(frozen=True)
class LossInputs:
    """Whole sequences, packed flat [t], on one device; no rank, no group, no padding. Index j speaks of token j.

    Log-probabilities are natural logs at the sampling temperature, float32 or wider. Where `mask` is False the prefixed
    logprobs equal the current ones (detached), so that every ratio there is 1 and nothing can overflow.
    """

    logprobs: Tensor
    """[t] float, the only field with gradient (beside `entropy` and `values`)."""
    rollout_logprobs: Tensor
    """[t] float, as the engine reported them."""
    advantages: Tensor
    """[t] float, detached."""
    mask: Tensor
    """[t] bool, True on tokens to train."""
    weights: TokenWeights
    """[t] each: every token's share of the minibatch (`aggregation`)."""
    seq_ids: Tensor
    """[t] int64 in 0..num_seqs-1, non-decreasing."""
    num_seqs: int
    constants: Mapping[str, float] = field(default_factory=dict)
    """Scalars of the whole minibatch."""
    optional: Mapping[str, Tensor] = field(default_factory=dict)
    """The declared ones of `OPTIONAL_FIELDS`."""

    def __getattr__(self, name: str) -> Any:
        """Optional fields read like the others; one that nobody declared raises and says so."""
        if name in OPTIONAL_FIELDS:
            optional = self.__dict__.get("optional", {})
            if name in optional:
                return optional[name]
            raise AttributeError(f"LossInputs.{name} was read but no part of the objective declared needs={{{name!r}}}")
        raise AttributeError(name)


@dataclass(frozen=True)
class TokenLoss:
    """What a policy loss returns: never masked, weighted, summed or reduced; `objective.py` does that once for all."""

    loss: Tensor
    """[t] with gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [t], bool or float; reduced as a mean over live tokens."""
    ratio: Tensor | None = None
    """[t], detached: exp of the log-ratio where it was made anyway, so that metrics need not make it again."""
    slope: Tensor | None = None
    """[t], detached: the derivative of `loss` where it was made anyway, by the log-ratio (ratio form) or the logprob
    (score form) of the same token; with it a gradient needs no backward pass."""
    is_shared: bool = False
    """`loss` is the same on all tokens of a sequence, and depends on each of their log-ratios by `slope`."""


@dataclass(frozen=True)
class CreditInputs:
    """All groups of one step, for a group credit rule. Order of rows is free; groups need not be equal in size."""

    rewards: Tensor
    """[n, c] float64: reward components, already multiplied by nothing; NaN marks an unscored row."""
    reward_weights: Tensor
    """[c] float64."""
    group_ids: Tensor
    """[n] int64."""
    lengths: Tensor
    """[n] int64: sampled tokens."""
    prompt_ids: tuple[str, ...]
    """[n]."""
    shaping: Tensor
    """[n] float64: sum of the shaping terms, added to the weighted sum of the components."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Saved state of rules that keep any (DCPO's prompt statistics)."""
