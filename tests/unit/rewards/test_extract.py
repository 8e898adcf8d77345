"""Answers found by string search."""

from __future__ import annotations

import pytest

from moerl.rewards.extract import extract_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed 5", None),
        (r"\boxedness {5}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_last_boxed(text, found):
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("how", "text", "found"),
    [
        ("boxed", r"x \boxed{1}", "1"),
        ("last_line", "a\n 42 \n\n", "42"),
        ("last_line", " \n ", None),
        ("answer_tag", "<answer>1</answer> <answer> 2 </answer> tail", "2"),
        ("answer_tag", "<answer>1", None),
        ("answer_tag", "1</answer>", None),
        ("all", "  a b ", "a b"),
    ],
)
def test_extract(how, text, found):
    assert extract_answer(text, how) == found


def test_long_hostile_text_is_searched_in_linear_time():
    assert last_boxed("\\boxed{" * 2000) is None
    assert last_boxed("{" * 200_000) is None
