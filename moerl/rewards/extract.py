r"""Finds the answer in a model's text, by string search alone: no pattern, nothing that can hang."""

from __future__ import annotations

EXTRACTS = ("boxed", "last_line", "answer_tag", "all")
"""`boxed`: inside the last `\boxed{...}`; `last_line`: the last line that is not blank; `answer_tag`: inside the last
`<answer>...</answer>`; `all`: the whole text."""


_BOXES = ("\\boxed", "\\fbox")
_MAX_NAME = 10


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
    r"""Contents of the last whole `\boxed{...}` or `\fbox{...}`, or None; in one pass, escaped braces passed over."""
    found: tuple[int, int] | None = None
    openings: list[int] = []
    position = min((at for at in (text.find(name) for name in _BOXES) if at >= 0), default=len(text))
    while position < len(text):
        char = text[position]
        if char == "\\" and text[position + 1 : position + 2] in ("{", "}", "\\"):
            position += 1
        elif char == "{":
            openings.append(position)
        elif char == "}" and openings:
            opening = openings.pop()
            is_box = text[max(0, opening - _MAX_NAME) : opening].rstrip().endswith(_BOXES)
            if is_box and (found is None or opening > found[0]):
                found = (opening, position)
        position += 1
    return None if found is None else text[found[0] + 1 : found[1]].strip()
