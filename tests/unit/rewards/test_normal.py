"""The normal form of answers that are counted in a majority vote."""

from __future__ import annotations

import pytest

from moerl.rewards.normal import normal_answer

SAME = [
    ["1000", " 1,000 ", "1000.0", "+1000", "$1000$", r"\boxed{1000}", "**1000**", r"\(1000\)", "1000.", r"1\,000"],
    ["0", "-0", "0.00", "+0"],
    ["-12345.6", "-12,345.60", "$-12345.6$"],
    [r"\frac{1}{2}", r"\dfrac{1}{2}", r"\tfrac {1} {2}", r"$\frac{1}{2}$"],
    ["(1,2)", "( 1, 2 )", r"\left(1,2\right)"],
    ["50", "50%", r"50\%"],
]


@pytest.mark.parametrize("spellings", SAME, ids=lambda spellings: spellings[0])
def test_one_answer_has_one_form(spellings):
    assert {normal_answer(text) for text in spellings} == {normal_answer(spellings[0])}


def test_different_answers_stay_different():
    texts = ["1", "-1", "10", "1.5", "1,5", "1,0000", "12,34", "x", "X", r"\frac{1}{2}", "(1,2)", "(2,1)", "", "1e3"]
    assert len({normal_answer(text) for text in texts}) == len(texts)


@pytest.mark.parametrize("text", [text for spellings in SAME for text in spellings])
def test_the_form_of_a_form_is_itself(text):
    assert normal_answer(normal_answer(text)) == normal_answer(text)


HOSTILE = ("{" * 10_000, "1," * 2000, "\\boxed{" * 500, "9" * 4096, "." * 4096, "\\left" * 800)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:6]} x {len(text)}")
def test_hostile_texts_have_a_form(text):
    assert isinstance(normal_answer(text), str)
