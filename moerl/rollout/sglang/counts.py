"""What happened to requests and servers, counted since the start, and as metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moerl.metrics import Metrics, Sum
from moerl.rollout.sglang.faults import FaultKind

PREFIX = "engine/"
_BY_KIND: dict[FaultKind, str] = {
    "lost": "lost",
    "late": "timeouts",
    "busy": "busy",
    "broken": "broken",
    "refused": "refused",
    "bad_answer": "bad_answers",
}


@dataclass
class DispatchCounts:
    """Of one dispatcher, since the start."""

    completions: int = 0
    requests: int = 0
    """Attempts: one completion may take several."""
    retries: int = 0
    """Requests that were sent again after a fault; nothing of the attempt before is kept."""
    resent: int = 0
    """Of those, the ones that went to another server."""
    lost: int = 0
    """Attempts whose connection broke, or whose server had lost its weights."""
    timeouts: int = 0
    """Attempts without an answer in `request_timeout_seconds`."""
    busy: int = 0
    """Attempts that were answered with 429 or 503."""
    broken: int = 0
    """Attempts that were answered with another 5xx."""
    refused: int = 0
    bad_answers: int = 0
    """Answers that broke the protocol; like refused requests they are not tried again."""
    resumes: int = 0
    """Aborted parts that were continued as new requests."""
    aborted: int = 0
    """Completions that the caller cancelled."""
    dropped_tokens: int = 0
    """Of aborted requests whose logprobs or routes did not come."""
    generated_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    retractions: int = 0

    def note_fault(self, kind: FaultKind) -> None:
        """One attempt failed."""
        name = _BY_KIND[kind]
        setattr(self, name, getattr(self, name) + 1)


class Differences:
    """Counts since the start -> metrics since the last call."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def take(self, counts: Mapping[str, int]) -> Metrics:
        """`engine/<name>` of every count."""
        found: Metrics = {
            PREFIX + name: Sum(float(count - self._before.get(name, 0))) for name, count in counts.items()
        }
        self._before = dict(counts)
        return found
