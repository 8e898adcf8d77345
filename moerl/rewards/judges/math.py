r"""Mathematical equality by math-verify, with the rules that it lacks. Runs in the sandbox only.

Rules, in this order:

0.  Thousands. `1{,}000`, `1\,000`, `1,\!000` are one number anywhere. Inside round, square, angle or set brackets a
    bare comma before three digits makes one only where a group begins with 0 (`(1,000+x)`), because `(120,150)` is a
    pair and `[0,100)` an interval. At top level a bare comma or space (`1,234`, `1 234`) may be in a number or in a
    list: both sides are read as numbers, then both as lists, and either may agree.
1.  Words. A gold answer of words (`\text{Thursday}`, `Paris`, `B`) is compared as words: case, white space, `\text`
    and brackets around a single letter aside. math-verify would read `Paris` as a product of letters, equal to `Pairs`.
2.  Several parts, strict. Both sides are cut at top level at commas, semicolons, `and`, `or`, and between two bare
    numbers; a finite set is its parts. The numbers of parts must agree and each gold part needs an answer part of its
    own, in any order: `1331 and 1728` is not `1728`.
3.  Per cent. With a per cent sign on one side only, the number counts as it stands (the sign is a unit) or as a
    hundredth. With the sign on both sides it is dropped from both.
4.  What math-verify would misread counts only if it is the same string: an operator or fraction left hanging once
    unit-like text is taken out (`1-1/\mathrm{x}`), a ratio (`12:30` would be 2/5).
5.  math-verify, gold first; without its own alarms (they need the main thread and fire unreliably), since the
    sandbox keeps time. Numbers are equal to six digits after the point (`\frac{\pi}{4}` and `0.785398`).
"""

from __future__ import annotations

import logging
import re
from typing import Any

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # noqa: E402

_EXTRACTION = (LatexExtractionConfig(), ExprExtractionConfig())
_WORD = r"[A-Za-z][A-Za-z'’.-]*"
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textrm|textit|mbox|operatorname)\s*\{([^{}]*)\}")
_UPRIGHT_CONSTANT = re.compile(r"\\(?:text|mathrm|mathbf|operatorname)\s*(?:\{\s*([ei])\s*\}|\s([ei])(?![A-Za-z]))")
_SPACING = re.compile(r"\\[,;:!]|\\(?:quad|qquad|left|right|displaystyle)(?![A-Za-z])|~")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,\\!|,|\{,\}|\\,|\\!|\s|\\ )\d{3})+(?!\d)")
_THOUSANDS_MARK = re.compile(r",\\!|\{,\}|\\[,! ]")
_BARE_ZERO = re.compile(r"[,\s]0")
_BRACKET = re.compile(r"\\(?:lbrace|rbrace|langle|rangle)(?![A-Za-z])|\\?[{}]|[()\[\]]")
_SEPARATOR = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|,?\s*\b(?:and|or)\b|[,;]")
_TWO_NUMBERS = re.compile(r"(?<![\w}/.^_])(-?\d+(?:\.\d+)?)\s+(?=-?\d+(?:\.\d+)?\s*(?:$|[-+]?\d))")
_DANGLING = re.compile(
    r"(?:[-+*/^=<>_]|\\(?:cdot|times|div|le|ge|leq|geq))\s*(?:$|[)\]},])|\\[dt]?frac\s*(?:\{[^{}]*\})?\s*\{\s*\}"
)
_MIXED_NUMBER = re.compile(r"(?<![\d./])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])")
_RATIO = re.compile(r"\d\s*:\s*\d")
_PERCENT = re.compile(r"\\?%|\\text\s*\{\s*percent\s*\}|\bpercent\b")


def warm_up() -> None:
    """Parse once what is slow the first time; every task is forked from here."""
    for text in ("1", r"\frac{1}{2}+\sqrt{3}", r"x^2-1", r"[0,\infty)", r"\begin{pmatrix}1\\2\end{pmatrix}"):
        verify(_parse(text), _parse(text), timeout_seconds=None)


def is_equal(gold: str, answer: str) -> bool:
    """Whether `answer` is worth the point; `gold` without `$` or box."""
    readings = dict.fromkeys((_tidy(gold, lists=lists), _tidy(answer, lists=lists)) for lists in (False, True))
    return any(_is_equal(gold, answer) for gold, answer in readings)


def _is_equal(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    if _is_words(gold):
        return _words(gold) == _words(answer)
    gold_parts, answer_parts = _parts(gold), _parts(answer)
    if len(gold_parts) != len(answer_parts):
        return False
    if len(gold_parts) == 1:
        return _is_equal_part(gold_parts[0], answer_parts[0])
    return _is_matched(gold_parts, answer_parts)


def unparsable(golds: list[str]) -> list[str | None]:
    """For each gold answer why nothing could ever equal it, or None."""
    return [_problem(_tidy(gold)) for gold in golds]


def _problem(gold: str) -> str | None:
    if _is_words(gold):
        return None
    for part in _parts(gold) or [""]:
        if _is_untrusted(part):
            continue  # compared as a string
        if all(isinstance(value, str) for value in _parse(_PERCENT.sub("", part))):
            return f"gold answer {gold[:60]!r} does not parse as mathematics (part {part[:60]!r})"
    return None


def _tidy(text: str, *, lists: bool = False) -> str:
    """`lists`: whether what may be a number with thousands or a list is a list."""
    text = text.strip().replace("−", "-").replace("\\$", "").replace("$", "")
    text = text.removeprefix("**").removesuffix("**").strip()
    text = _UPRIGHT_CONSTANT.sub(lambda m: f" {m[1] or m[2]}", text)
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    text = _join_thousands(text, lists=lists)
    return re.sub(r"\s+", " ", _SPACING.sub(" ", text)).strip()


def _join_thousands(text: str, *, lists: bool) -> str:
    """Rule 0."""

    def joined(number: re.Match[str]) -> str:
        digits = _THOUSANDS_MARK.sub("", number[0])
        if lists and not _BARE_ZERO.search(digits):
            return digits
        is_list = _is_enclosed(text, number.start()) and not _BARE_ZERO.search(digits)
        return re.sub(r"[^\d,]" if is_list else r"\D", "", digits)

    return _THOUSANDS.sub(joined, text)


def _is_enclosed(text: str, position: int) -> bool:
    """Whether the innermost open bracket is of a tuple, an interval, a set or a vector, rather than one that groups."""
    opened: list[str] = []
    for found in _BRACKET.finditer(text, 0, position):
        is_closing = found[0] in {"}", "\\}", ")", "]", "\\rbrace", "\\rangle"}
        if is_closing and opened:
            opened.pop()
        elif not is_closing or found[0] == "]":  # `]0,1[` is an interval too
            opened.append(found[0])
    return bool(opened) and opened[-1] != "{"


def _is_words(text: str) -> bool:
    plain = _words(text)
    return bool(plain) and re.fullmatch(rf"{_WORD}(?: {_WORD})*", plain) is not None and not _is_symbol(text)


def _is_symbol(text: str) -> bool:
    r"""A lone lower-case letter, or an upright constant, is a variable; `\text{a}` and `B` are words."""
    return re.fullmatch(r"[a-z]|pi|inf|infinity", text) is not None


def _words(text: str) -> str:
    plain = _TEXT_COMMAND.sub(r"\1", _TEXT_COMMAND.sub(r"\1", text))
    plain = re.sub(r"\s+", " ", plain).strip(" .")
    single = re.fullmatch(r"\(\s*([A-Za-z])\s*\)", plain)
    return (single[1] if single else plain).casefold()


def _parts(text: str) -> list[str]:
    braced = text.replace("\\{", "{").replace("\\}", "}")
    if braced.startswith("{") and braced.endswith("}") and min(_depths(braced)[:-1]) > 0:
        text = braced[1:-1].strip()
    pieces = []
    start = 0
    depths = _depths(text)
    for cut in _SEPARATOR.finditer(text):
        if depths[cut.start()] == 0 and text[cut.start() : cut.start() + 1] not in "([{":
            pieces.append(text[start : cut.start()])
            start = cut.end()
    pieces.append(text[start:])
    split = [half for piece in pieces for half in _TWO_NUMBERS.sub(r"\1;", piece.strip()).split(";")]
    return [piece.strip() for piece in split if piece.strip()]


def _depths(text: str) -> list[int]:
    """Bracket depth after each character; an interval may open and close with unlike brackets."""
    depths, depth = [], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        depths.append(depth)
    return depths


def _is_matched(gold_parts: list[str], answer_parts: list[str]) -> bool:
    """Whether each gold part has an answer part of its own (augmenting paths)."""
    equal = [[_is_equal_part(g, a) for a in answer_parts] for g in gold_parts]
    owner: dict[int, int] = {}

    def place(part: int, tried: set[int]) -> bool:
        for j in range(len(answer_parts)):
            if equal[part][j] and j not in tried:
                tried.add(j)
                if j not in owner or place(owner[j], tried):
                    owner[j] = part
                    return True
        return False

    return all(place(part, set()) for part in range(len(gold_parts)))


def _is_equal_part(gold: str, answer: str) -> bool:
    if _squeeze(gold) == _squeeze(answer):
        return True
    if _is_untrusted(gold) or _is_untrusted(answer):
        return False
    if _PERCENT.search(gold) or _PERCENT.search(answer):
        return _is_equal_per_cent(gold, answer)
    return _verify(gold, answer)


def _is_equal_per_cent(gold: str, answer: str) -> bool:
    bare_gold, bare_answer = (_PERCENT.sub("", side).strip() for side in (gold, answer))
    if not bare_gold or not bare_answer:
        return False
    if _verify(bare_gold, bare_answer):
        return True
    if bare_gold != gold and bare_answer != answer:
        return False
    if bare_gold != gold:
        return _verify(rf"\frac{{{bare_gold}}}{{100}}", bare_answer)
    return _verify(bare_gold, rf"\frac{{{bare_answer}}}{{100}}")


def _is_untrusted(text: str) -> bool:
    return bool(_DANGLING.search(_TEXT_COMMAND.sub("", text).strip()) or _RATIO.search(text))


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _verify(gold: str, answer: str) -> bool:
    return verify(_parse(gold), _parse(answer), timeout_seconds=None)


def _parse(text: str) -> Any:
    no_alarm: Any = None  # its annotation says int, its code and its warning say None
    return parse(f"${text}$", extraction_config=_EXTRACTION, parsing_timeout=no_alarm)
