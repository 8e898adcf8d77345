"""What can go wrong between this process and one server, told apart by what a dispatcher should do about it."""

from __future__ import annotations

from typing import Literal

from moerl.errors import RolloutError

FaultKind = Literal["lost", "busy", "broken", "refused", "bad_answer", "late"]
"""lost: no whole answer came (refused, dropped or truncated). busy: 429 or 503, it will take requests again. broken:
any other 5xx. refused: 4xx, the request itself is wrong. bad_answer: it breaks the API. late: none came in time."""

_RETRIED: frozenset[FaultKind] = frozenset({"lost", "busy", "broken", "late"})
_SUSPECT: frozenset[FaultKind] = frozenset({"lost", "broken", "late"})
_MAX_SHOWN = 300
"""Characters of a server's words that a message repeats."""


class ServerError(RolloutError):
    """One call to one server failed; names the server, the endpoint, what came, and what to do."""

    def __init__(self, kind: FaultKind, server: str, endpoint: str, came: str, do: str) -> None:
        super().__init__(f"{server}{endpoint}: {came}; {do}")
        self.kind: FaultKind = kind
        self.server = server
        self.endpoint = endpoint

    @property
    def is_retried(self) -> bool:
        """Whether the same request may succeed, on this server later or on another now."""
        return self.kind in _RETRIED

    @property
    def is_suspect(self) -> bool:
        """Whether it speaks against the server rather than the request."""
        return self.kind in _SUSPECT


def shown(text: str) -> str:
    """A server's words on one line, cut."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN else line[:_MAX_SHOWN] + "..."
