"""pass@k, majority vote and best-of-k: equal to counting every draw, and the laws that follow from it."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.selection import best_of_k, maj_at_k, pass_at_k


def draws(items, k):
    return list(itertools.combinations(items, k))


def majority_of(draw):
    """Share of the winners' verdicts in one draw: every answer that has most votes wins equally often."""
    sizes = Counter(vote for vote, _ in draw if vote is not None)
    if not sizes:
        return Fraction(0)
    winners = [vote for vote, size in sizes.items() if size == max(sizes.values())]
    return Fraction(sum(all(right for vote, right in draw if vote == winner) for winner in winners), len(winners))


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_answer(num_samples):
    for num_right in range(num_samples + 1):
        verdicts = [True] * num_right + [False] * (num_samples - num_right)
        for k in range(1, num_samples + 1):
            expected = sum(map(any, draws(verdicts, k))) / len(draws(verdicts, k))
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_stays_exact_where_binomials_are_huge():
    assert pass_at_k(4000, 1, 2000) == pytest.approx(0.5, abs=1e-12)
    assert pass_at_k(4000, 0, 4000) == 0.0
    assert pass_at_k(4000, 3999, 2) == 1.0


VOTES = st.lists(st.sampled_from(["7", "8", "9", "10", None]), min_size=1, max_size=8)


@settings(max_examples=150)
@given(VOTES, st.sets(st.sampled_from(["7", "8", "10"])), st.data())
def test_maj_at_k_is_the_mean_over_every_draw(votes, gold, data):
    k = data.draw(st.integers(1, len(votes)))
    answers = [(vote, vote in gold) for vote in votes]
    expected = sum(map(majority_of, draws(answers, k))) / len(draws(answers, k))
    found = maj_at_k(votes, [vote in gold for vote in votes], k)
    assert found == pytest.approx(float(expected), abs=1e-12)
    order = data.draw(st.permutations(range(len(votes))))
    assert maj_at_k([votes[i] for i in order], [votes[i] in gold for i in order], k) == found
    assert found <= pass_at_k(len(votes), sum(vote in gold for vote in votes), k) + 1e-12


@pytest.mark.parametrize(
    ("votes", "right", "k", "expected"),
    [
        ("aab", [1, 1, 0], 3, 1.0),  # two of three
        ("aab", [1, 1, 0], 1, 2 / 3),  # k = 1: the accuracy
        ("aab", [1, 1, 0], 2, 2 / 3),  # aa wins, ab and ab tie: (1 + 1/2 + 1/2) / 3
        ("abc", [1, 0, 0], 3, 1 / 3),  # a tie of three
        ("aabb", [1, 1, 0, 0], 4, 0.5),  # a tie of two
        ("abb", [1, 0, 0], 3, 0.0),
    ],
)
def test_majorities_and_ties(votes, right, k, expected):
    assert maj_at_k(list(votes), [bool(r) for r in right], k) == pytest.approx(expected, abs=1e-15)


def test_answers_without_a_vote_neither_win_nor_count():
    assert maj_at_k(["a", None, None], [True, False, False], 3) == 1.0
    assert maj_at_k([None, None], [False, False], 2) == 0.0
    assert maj_at_k(["a", None], [True, False], 1) == 0.5


def test_equal_votes_with_different_verdicts_count_by_their_share():
    assert maj_at_k(["a", "a", "b"], [True, False, False], 3) == 0.5


def test_a_majority_of_many_is_exact_and_quick():
    votes = ["a"] * 30 + [str(i) for i in range(34)]
    assert maj_at_k(votes, [vote == "a" for vote in votes], 64) == 1.0
    assert maj_at_k(votes, [vote == "0" for vote in votes], 64) == 0.0
    middle = maj_at_k(votes, [vote == "a" for vote in votes], 8)
    assert 0.9 < middle < 1.0
    assert maj_at_k(votes, [True] * 64, 8) == pytest.approx(1.0, abs=1e-15)


SCORED = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=150)
@given(SCORED, st.data())
def test_best_of_k_is_the_mean_over_every_draw(answers, data):
    k = data.draw(st.integers(1, len(answers)))

    def best(draw):
        top = [right for score, right in draw if score == max(score for score, _ in draw)]
        return sum(top) / len(top)

    expected = sum(map(best, draws(answers, k))) / len(draws(answers, k))
    scores, values = [score for score, _ in answers], [float(right) for _, right in answers]
    found = best_of_k(scores, values, k)
    assert found == pytest.approx(expected, abs=1e-12)
    order = data.draw(st.permutations(range(len(answers))))
    assert best_of_k([scores[i] for i in order], [values[i] for i in order], k) == pytest.approx(found, abs=1e-12)
    if k > 1:
        assert best_of_k(scores, scores, k) >= best_of_k(scores, scores, k - 1) - 1e-12


def test_best_by_the_verdict_itself_is_pass_at_k():
    right = [1.0, 0.0, 0.0, 1.0, 0.0]
    for k in range(1, 6):
        assert best_of_k(right, right, k) == pytest.approx(pass_at_k(5, 2, k), abs=1e-12)
