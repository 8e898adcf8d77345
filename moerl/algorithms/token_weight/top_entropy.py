"""Train on the tokens of highest entropy alone (arXiv 2506.01939): entropy of the old policy, over the minibatch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.registries import token_weights
from moerl.algorithms.types import ENTROPY_THRESHOLD, LossInputs


@dataclass(frozen=True)
class TopEntropyConfig:
    """How many."""

    q: float = 0.2
    """Share of the minibatch's live tokens; tokens that tie with the last one are in."""

    def __post_init__(self) -> None:
        check_above("token_weight.q", self.q, 0.0)
        check_range("token_weight.q", self.q, 0.0, 1.0)


def entropy_threshold(entropies: Tensor, q: float) -> float:
    """The ceil(q m)-th largest of the live tokens' `entropies` [m]; inf where there are none."""
    if not len(entropies):
        return math.inf
    wanted = max(1, math.ceil(q * len(entropies) - 1e-9))
    return float(entropies.double().sort(descending=True).values[wanted - 1])


@token_weights.register(
    "top_entropy", TopEntropyConfig, needs=("old_entropy",), constants=(ENTROPY_THRESHOLD,), entropy_quantile=True
)
def top_entropy(x: LossInputs, cfg: TopEntropyConfig) -> Tensor:
    """1 at or above the minibatch's threshold, else 0."""
    return (x.old_entropy >= x.constants[ENTROPY_THRESHOLD]).to(x.advantages.dtype)
