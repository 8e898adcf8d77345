"""The oracle's sums over a batch: shares v_i of every aggregation, and the loss of pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oracle_numbers import Batch, Number, Seq, log_sigmoid


@dataclass(frozen=True)
class Shares:
    """v_i by the name of the aggregation; answers without a token have 0 and do not count, unless told to."""

    name: str
    budget: int = 0
    count_empty: bool = False
    per_sequence: bool = True

    def __call__(self, batch: Batch) -> list[float]:
        sequences = len(batch) if self.count_empty else sum(s.n > 0 for s in batch)
        tokens = sum(s.n for s in batch)
        of_group: dict[int, int] = {}
        for s in batch:
            of_group[s.group] = of_group.get(s.group, 0) + s.n
        groups = sum(count > 0 for count in of_group.values())
        forms: dict[str, Callable[[Seq], float]] = {
            "token_mean": lambda s: 1 / tokens,
            "seq_mean_token_mean": lambda s: 1 / (sequences * s.n),
            "seq_mean_token_sum": lambda s: 1 / sequences,
            "fixed_denominator": lambda s: 1 / ((sequences if self.per_sequence else 1) * self.budget),
            "prompt_mean": lambda s: 1 / (groups * of_group[s.group]),
            "seq_sum_token_mean": lambda s: 1 / s.n,
            "token_sum": lambda s: 1.0,
        }
        return [forms[self.name](s) if s.n else 0.0 for s in batch]


# Pairs


def group_dpo(batch: Batch, beta: float, *, length_norm: bool = False) -> Number:
    """Mean over groups with a best (A > 0) and a worst (A < 0) answer of -log sigmoid(beta * difference).

    Both must have a live token.
    """
    losses: list[Number] = []
    for group in {s.group for s in batch}:
        members = [s for s in batch if s.group == group and s.n]
        best = [s for s in members if s.advantage[s.mask.index(True)] > 0]
        worst = [s for s in members if s.advantage[s.mask.index(True)] < 0]
        if not best or not worst:
            continue
        change = [sum(s.now[t] - s.ref[t] for t in s.live()) for s in (best[0], worst[0])]
        if length_norm:
            change = [c / len(s.live()) for c, s in zip(change, (best[0], worst[0]), strict=True)]
        losses.append(-log_sigmoid(beta * (change[0] - change[1])))
    return sum(losses) / len(losses) if losses else 0.0
