"""The rules of the mathematical verifier, on the function that runs in the sandbox, and what is decided before it."""

from __future__ import annotations

import pytest

from moerl.rewards.judges.math import is_equal, unparsable
from moerl.rewards.math_verify import bare_gold, plain_number, quick_equal


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"\frac{\pi}{4}", "0.785398"),
        ("5", "x=5"),
        (r"5\text{ cm}", "5"),
        ("-5", "−5"),
        ("1000", "1,000"),
        ("1000", r"1\,000"),
        ("1{,}000{,}000", "10^6"),
        (r"3\frac12", "7/2"),
        ("3 1/2", "3.5"),
        ("90^\\circ", "90"),
        (r"\$5", "5"),
        ("x^2-1", "(x-1)(x+1)"),
        ("[0,1)", "[0,1)"),
        (r"(-\infty,2]\cup[3,\infty)", r"[3,\infty)\cup(-\infty,2]"),
        (r"1-1/\mathrm e", r"1-\frac{1}{e}"),
        ("12:30", "12:30"),
        (r"\text{B}", "B"),
        (r"\text{B}", r"\textbf{(B)}"),
        ("Paris", r"\text{paris}"),
    ],
)
def test_equal(gold, answer):
    assert is_equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"1-1/\mathrm e", r"1+1/\mathrm e"),
        (r"1-1/\mathrm{x}", r"1+1/\mathrm{x}"),
        ("Paris", "Pairs"),
        ("12:30", "24:60"),
        ("2:3", r"\frac{2}{3}"),
        ("15", "7 8"),
        ("7 8", "15"),
        ("11", "1 1"),
        ("3", "3/"),
        (r"\frac{3}{4}", r"\frac{3}{}"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "1,2"),
        ("[0,1)", "[0,1]"),
        ("B", "C"),
        ("0", ""),
        ("y", "x"),
    ],
)
def test_known_false_positives_stay_wrong(gold, answer):
    """Math-Verify#82: what math-verify, or a naive use of it, would accept."""
    assert not is_equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1728", "1331 and 1728", False),
        ("1331 and 1728", "1728", False),
        ("1331 and 1728", r"1728 \text{ and } 1331", True),
        ("1331, 1728", "1728; 1331", True),
        ("1, 2, 3", "3,1,2", True),
        ("1, 2, 3", "3,1", False),
        ("1, 2, 3", "3,1,1", False),
        ("1, 1, 2", "1, 2, 2", False),
        (r"\{1,2\}", "2,1", True),
        (r"x=1 \text{ or } x=2", "2, 1", True),
        (r"(1,2), (3,4)", r"(3,4), (1,2)", True),
        (r"(1,2), (3,4)", r"(1,2)", False),
    ],
)
def test_several_parts_are_strict(gold, answer, equal):
    """Math-Verify#47."""
    assert is_equal(gold, answer) is equal


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1,234", "1234", True),
        ("1,234", "1,235", False),
        (r"58,\!500", "58500", True),
        (r"1\,234,5", "1234, 5", True),
        ("1 234", "1234", True),
        ("(1 234, 5)", "(1234, 5)", True),
        (r"\frac{1,234}{2}", "617", True),
        (r"2^{1,234}", "2^{1234}", True),
        (r"\{x \mid 100<x<1,000\}", r"\{x \mid 100<x<1000\}", True),
        ("3(1,000+x)", "3000+3x", True),
        (r"(10,\!500, 5)", "(10500, 5)", True),
        ("(120,150)", "(120, 150)", True),
        ("(120,150)", "(150,120)", False),
        ("(3,125)", "(3125)", False),
        ("(3,125)", "3125", False),
        ("(3,125)", "3,125", False),
        ("(1,234,567)", "(1, 234, 567)", True),
        ("(2,100)", r"\left(2, 100\right)", True),
        ("(1,200), (3,400)", "(3, 400), (1, 200)", True),
        ("[0,100)", "[0, 100)", True),
        ("[0,100)", "[0, 101)", False),
        ("]0,100[", "]0, 100[", True),
        (r"(0,100)\cup(200,300)", r"(0, 100) \cup (200, 300)", True),
        (r"\{100,200\}", r"\{200, 100\}", True),
        (r"\langle 1,200\rangle", r"\langle 1, 200\rangle", True),
        ("100,200,300", "100, 200, 300", True),
        ("100,200,300", "300,200,100", True),
        ("100,200,300", "100, 200", False),
        ("1,234 and 5", "5, 1234", True),
        ("100 200", "100, 200", True),
    ],
)
def test_a_comma_before_three_digits_is_of_a_number_or_of_a_list(gold, answer, equal):
    assert is_equal(gold, answer) is equal


def test_gold_goes_first():
    """Math-Verify#25: the comparison is not symmetric, so swapped arguments would show."""
    inequality, interval = r"m\ge\sqrt2", r"m\in[\sqrt2,\infty)"
    assert is_equal(inequality, interval)
    assert not is_equal(interval, inequality)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"50\%", r"50\%", True),
        (r"50\%", "50", True),
        (r"50\%", "0.5", True),
        (r"50\%", r"\frac{1}{2}", True),
        ("0.5", r"50\%", True),
        ("50", r"50\%", True),
        (r"50\%", "5", False),
        (r"50\%", r"0.5\%", False),
        (r"50\%", r"\%", False),
    ],
)
def test_per_cent_rule(gold, answer, equal):
    assert is_equal(gold, answer) is equal


@pytest.mark.parametrize(
    "gold", ["$7$", r"\boxed{7}", "**7**", r"\(7\)", r"\[ 7 \]", "$$7$$", " 7. ", r"so \boxed{7}."]
)
def test_wrapping_of_gold_answers_is_taken_off(gold):
    """Math-Verify#76."""
    assert bare_gold(gold) == "7"


def test_gold_answers_that_do_not_parse_are_told():
    """Math-Verify#76: bare LaTeX, bold, words and lists are fine; fragments are not."""
    good = [r"\frac{\sqrt3}{3}", "73", r"\text{B}", "1331 and 1728", "Thursday", r"50\%", "12:30", "f(x)=x^2"]
    assert unparsable(good) == [None] * len(good)
    for reason, gold in zip(unparsable([r"\frac{", "]", "???"]), [r"\frac{", "]", "???"], strict=True):
        assert reason is not None
        assert repr(gold) in reason


@pytest.mark.parametrize(
    ("gold", "answer", "known"),
    [
        ("7", "7.0", True),
        ("7", "-7", False),
        ("7", "+7", True),
        ("a", "a", True),
        ("7", "14/2", None),
        ("7", "7 ", True),
    ],
)
def test_plain_numbers_are_decided_without_a_process(gold, answer, known):
    assert quick_equal(gold, answer) is known


@pytest.mark.parametrize("text", ["", "-", ".", "1e9", "1,000", "٣", "9" * 61, "1.2.3", "--1", "nan"])
def test_only_plain_decimals_are_plain_numbers(text):
    assert plain_number(text) is None
