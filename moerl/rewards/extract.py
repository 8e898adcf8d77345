r"""Finds the answer in a model's text, by string search alone: no pattern, nothing that can hang."""

from __future__ import annotations

EXTRACTS = ("boxed", "last_line", "answer_tag", "all")
"""`boxed`: inside the last `\boxed{...}`; `last_line`: the last line that is not blank; `answer_tag`: inside the last
`<answer>...</answer>`; `all`: the whole text."""


def extract_answer(text: str, how: str) -> str | None:
    """The answer, stripped; None where the text has none."""
    if how == "boxed":
        return last_boxed(text)
    if how == "last_line":
        return text.strip().rpartition("\n")[2].strip() or None
    if how == "answer_tag":
        _, opening, inside = text.rpartition("<answer>")
        answer, closing, _ = inside.partition("</answer>")
        return answer.strip() if opening and closing else None
    assert how == "all"
    return text.strip()


def last_boxed(text: str) -> str | None:
    r"""Contents of the last whole `\boxed{...}` or `\fbox{...}` (braces balanced, escaped ones passed over); None
    without one.
    """
    end = len(text)
    while (start := max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))) >= 0:
        opening = text.find("{", start)
        name = text[start:opening] if opening >= 0 else ""
        if name.strip() in ("\\boxed", "\\fbox"):
            inside = _balanced(text, opening)
            if inside is not None:
                return inside.strip()
        end = start
    return None


def _balanced(text: str, opening: int) -> str | None:
    depth = 0
    position = opening
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : position]
        position += 1
    return None
