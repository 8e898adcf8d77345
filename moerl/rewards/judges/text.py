"""Regular expressions on a model's text."""

from __future__ import annotations

import re


def last_group(text: str, pattern: str) -> str | None:
    """The first group of the last match, stripped; None where nothing matches."""
    last = None
    for match in re.finditer(pattern, text):
        last = match
    return None if last is None else (last.group(1) or "").strip()


def captures(text: str, gold: str, pattern: str, ignore_case: bool) -> bool:
    """Whether the last match's group `answer`, or else its first group, is `gold`, stripped."""
    compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    last = None
    for match in compiled.finditer(text):
        last = match
    if last is None:
        return False
    found = (last.group("answer" if "answer" in compiled.groupindex else 1) or "").strip()
    gold = gold.strip()
    return found.casefold() == gold.casefold() if ignore_case else found == gold
