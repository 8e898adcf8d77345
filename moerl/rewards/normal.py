"""One spelling for answers that differ in nothing but form, so that they can be counted; string operations alone."""

from __future__ import annotations

from moerl.rewards.math_verify import bare_gold, plain_number

_DROPPED = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "\\$", "^\\circ", "^{\\circ}", "\\%", "%")
_REPLACED = (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\text{", "{"), ("\\mathrm{", "{"))
_MAX_LENGTH = 4096
"""Longer texts are no answers; they are compared as they are."""


def normal_answer(answer: str) -> str:
    r"""`1,000.0`, `$1000$` and `\boxed{1000}` -> `1000`; `\dfrac 12` -> `\frac12`. Case stays, as in `x` and `X`.

    What a verifier calls equal may still differ here (`1/2` and `0.5`): this is no proof of equality, and needs none.
    """
    if len(answer) > _MAX_LENGTH:
        return answer
    text = bare_gold(answer.strip())
    for mark in _DROPPED:
        text = text.replace(mark, "")
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = "".join(text.split())
    number = plain_number(_without_thousands(text))
    if number is None:
        return text
    return format(number.normalize() + 0, "f")  # + 0: no negative zero


def _without_thousands(text: str) -> str:
    """`-12,345.6` -> `-12345.6`; a comma anywhere else stays."""
    whole, point, fraction = text.partition(".")
    first, *others = whole.split(",")
    digits = first.removeprefix("-").removeprefix("+")
    grouped = 1 <= len(digits) <= 3 and all(len(part) == 3 for part in others)
    return first + "".join(others) + point + fraction if others and grouped else text
