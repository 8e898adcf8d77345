"""Reads several answers with stated probabilities out of one response (verbalized sampling, arXiv 2510.01171)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moerl.errors import ConfigError
from moerl.types import Candidate

FAULTS = (
    "unterminated",
    "empty",
    "missing_probability",
    "not_a_number",
    "not_finite",
    "negative",
    "over_one",
    "zero_sum",
    "duplicate",
    "too_few",
    "too_many",
)
"""What can be wrong with a response. The first six drop the candidate; the others are counted and made the best of."""

_NUMBER = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?(?:nan|inf|infinity))(\s*%)?", re.IGNORECASE
)
_LONGEST_NUMBER = 64


@dataclass(frozen=True, slots=True)
class Markers:
    """What stands around an answer and around its probability."""

    text_open: str
    text_close: str
    probability_open: str
    probability_close: str

    def check(self, where: str) -> None:
        """Raises `ConfigError` for a marker that is empty or holds another, so that each place in a text is one."""
        named = {
            "text_open": self.text_open,
            "text_close": self.text_close,
            "probability_open": self.probability_open,
            "probability_close": self.probability_close,
        }
        for name, marker in named.items():
            if not marker.strip():
                raise ConfigError(f"{where}.{name} is {marker!r}; it must hold a character that is not white space")
        for name, marker in named.items():
            for other, inner in named.items():
                if other != name and inner in marker:
                    raise ConfigError(
                        f"{where}.{name}={marker!r} holds {other}={inner!r}; no marker may be part of another"
                    )

    @property
    def all(self) -> tuple[str, str, str, str]:
        """In the order of the fields."""
        return (self.text_open, self.text_close, self.probability_open, self.probability_close)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a response holds."""

    candidates: tuple[Candidate, ...]
    """Distinct texts in the order in which they came; weights sum to 1. Empty: nothing usable."""
    stated: tuple[float, ...]
    """[n] the probabilities as they were written (30% is 0.3), of every candidate that was read, duplicates apart."""
    faults: Mapping[str, int]
    """Kind of `FAULTS` -> how often."""


def parse_candidates(text: str, markers: Markers, expected: int) -> Parsed:
    """Candidates of `text`, in time linear in its length; no text makes it raise.

    Per arXiv 2510.01171 and its use here: a probability that is no number, not finite or negative drops its candidate,
    the others are renormalised, and where all are zero they are equally likely. Numbers over 1 are shares of their sum
    (30 and 70). Equal texts are one candidate with the sum of their shares. Beyond `expected` the rest is not read.
    """
    faults: Counter[str] = Counter()
    read = _read(text, markers, faults)
    if len(read) > expected:
        faults["too_many"] += len(read) - expected
        read = read[:expected]
    elif read and len(read) < expected:
        faults["too_few"] += expected - len(read)
    stated = tuple(share for _, share in read)
    faults["over_one"] += sum(share > 1.0 for share in stated)
    if not read:
        return Parsed((), (), +faults)
    if max(stated) == 0.0:
        faults["zero_sum"] += 1
    weights = _normalised(stated)
    merged: dict[str, float] = {}
    for (answer, _), weight in zip(read, weights, strict=True):
        merged[answer] = merged.get(answer, 0.0) + weight
    faults["duplicate"] += len(read) - len(merged)
    return Parsed(tuple(Candidate(answer, weight) for answer, weight in merged.items()), stated, +faults)


def entropy(weights: Sequence[float]) -> float:
    """Of a distribution, nats."""
    return -math.fsum(w * math.log(w) for w in weights if w > 0.0)


def _read(text: str, markers: Markers, faults: Counter[str]) -> list[tuple[str, float]]:
    """(answer, stated share) of every well-formed candidate. One pass over the markers, whatever order they come in."""
    found: list[tuple[str, float]] = []
    state, start, answer = "outside", 0, ""
    text_open, text_close, probability_open, probability_close = markers.all
    pattern = re.compile("|".join(map(re.escape, markers.all)))
    for mark in pattern.finditer(text):
        kind = mark.group()
        if kind == text_open:
            _count_unfinished(state, faults)
            state, start = "text", mark.end()
        elif kind == text_close and state == "text":
            state, answer = "answered", text[start : mark.start()].strip()
        elif kind == probability_open and state == "answered":
            state, start = "probability", mark.end()
        elif kind == probability_close and state == "probability":
            state = "outside"
            share = _share(text[start : mark.start()], faults)
            if share is not None and not answer:
                faults["empty"] += 1
            elif share is not None:
                found.append((answer, share))
    _count_unfinished(state, faults)
    return found


def _count_unfinished(state: str, faults: Counter[str]) -> None:
    if state in ("text", "probability"):
        faults["unterminated"] += 1
    elif state == "answered":
        faults["missing_probability"] += 1


def _share(written: str, faults: Counter[str]) -> float | None:
    """The number in `written`, per cent understood; None, and counted, where it cannot be used."""
    if not written.strip():
        faults["missing_probability"] += 1
        return None
    match = _NUMBER.fullmatch(written.strip()) if len(written) <= _LONGEST_NUMBER else None
    if match is None:
        faults["not_a_number"] += 1
        return None
    share = float(match.group(1)) / (100.0 if match.group(2) else 1.0)
    if not math.isfinite(share):
        faults["not_finite"] += 1
        return None
    if share < 0.0:
        faults["negative"] += 1
        return None
    return abs(share)  # -0.0 is 0


def _normalised(shares: Sequence[float]) -> list[float]:
    """Shares of 1. Scaled by the largest first, so that no sum of large ones overflows."""
    largest = max(shares)
    if largest == 0.0:
        return [1.0 / len(shares)] * len(shares)
    scaled = [share / largest for share in shares]
    total = math.fsum(scaled)
    return [share / total for share in scaled]
