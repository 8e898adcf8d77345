"""What k answers are worth that are drawn from n: pass@k, majority vote, best-of-k. Exact over all draws.

Each is the mean over every choice of k of the n answers, without replacement, so it is an unbiased estimate for k
fresh answers and does not depend on the answers' order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction

import numpy as np


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that one of k answers is right, `num_right` of `num_samples` being so (arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def maj_at_k(votes: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Chance that the answer most of k drawn ones give is right (self-consistency, arXiv 2203.11171).

    Answers that tie for most votes win equally often. None casts no vote; where no drawn answer votes, the outcome is
    wrong. Where equal votes have different verdicts (a verifier may look at more), the winner counts by their share.

    Args:
        votes: [n] the normalised answers.
        right: [n] their verdicts.
        k: 1 <= k <= n.
    """
    sizes = Counter(vote for vote in votes if vote is not None)
    num_right = Counter(vote for vote, is_right in zip(votes, right, strict=True) if vote is not None and is_right)
    silent = len(votes) - sizes.total()
    chance = Fraction(0)
    for vote, good in num_right.items():
        others = [size for other, size in sizes.items() if other != vote]
        chance += Fraction(good, sizes[vote]) * _win_ways(sizes[vote], others, silent, k)
    return float(chance / math.comb(len(votes), k))


def best_of_k(scores: Sequence[float], values: Sequence[float], k: int) -> float:
    """Mean value of the answer with the highest score of k drawn ones; answers that tie for it count equally.

    Args:
        scores: [n] finite, what is chosen by.
        values: [n] what the chosen one is worth: its verdict, or its score itself.
        k: 1 <= k <= n.
    """
    by_score: dict[float, list[float]] = {}
    for score, value in zip(scores, values, strict=True):
        by_score.setdefault(score, []).append(value)
    below, result = 0, 0.0
    for score in sorted(by_score):
        tied = by_score[score]
        ways = math.comb(below + len(tied), k) - math.comb(below, k)
        result += ways / math.comb(len(scores), k) * (sum(tied) / len(tied))
        below += len(tied)
    return result


def _win_ways(size: int, others: Sequence[int], silent: int, k: int) -> Fraction:
    """In how many choices of k an answer with `size` votes in all gets most, a tie of m counting 1 / m."""
    ways = Fraction(0)
    for own in range(1, min(size, k) + 1):
        left = k - own
        # table[m, v]: ways to draw v of the other answers so that nobody has more than `own` votes and m have as many.
        table = np.zeros((left // own + 1, left + 1), dtype=object)
        table[0] = [math.comb(silent, v) for v in range(left + 1)]
        for other in others:
            table = _with_other(table, other, own)
        ways += math.comb(size, own) * sum(Fraction(int(row[left]), 1 + m) for m, row in enumerate(table))
    return ways


def _with_other(table: np.ndarray, size: int, own: int) -> np.ndarray:
    """The table with one more answer of `size` votes, which gets at most `own`."""
    width = table.shape[1]
    new = np.zeros_like(table)
    for drawn in range(min(size, own - 1, width - 1) + 1):
        new[:, drawn:] += math.comb(size, drawn) * table[:, : width - drawn]
    if size >= own and width > own:
        new[1:, own:] += math.comb(size, own) * table[:-1, : width - own]
    return new
