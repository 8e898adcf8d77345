"""The attempts of one completion: whether another may follow, and after how long."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from moerl.rollout.sglang.faults import ServerError

if TYPE_CHECKING:
    from moerl.rollout.sglang.dispatcher import DispatchSettings

_MIN_WAIT_SECONDS, _MAX_WAIT_SECONDS = 0.001, 10.0
_MAX_DOUBLINGS = 20


class Tries:
    """The attempts of one completion: whether another may follow, and after how long."""

    def __init__(self, settings: DispatchSettings) -> None:
        self._settings = settings
        self._num_failed = self._num_busy = 0
        self._busy_in_a_row = 0
        self._busy_seconds = 0.0
        """Waited for a full queue since the last answer."""

    def wait_after(self, error: ServerError) -> float | None:
        """Seconds until the next attempt; None: `error` stands. A full queue has its time, and uses up no retry."""
        if error.kind == "busy":
            if self._busy_seconds >= self._settings.request_timeout_seconds:
                return None
            self._num_busy += 1
            self._busy_in_a_row += 1
            seconds = drawn_wait(self._settings, self._busy_in_a_row)
            self._busy_seconds += seconds
            return seconds
        self._busy_in_a_row = 0
        if not error.is_retried or self._num_failed == self._settings.num_retries:
            return None
        self._num_failed += 1
        return drawn_wait(self._settings, self._num_failed)

    def note_answer(self) -> None:
        """A queue had room."""
        self._busy_in_a_row, self._busy_seconds = 0, 0.0

    def said(self) -> str:
        """For the error that stands."""
        retries = self._num_failed + self._num_busy
        return f" (after {retries} retries)" if retries else ""


def drawn_wait(settings: DispatchSettings, place: int) -> float:
    """Seconds before the retry that is the `place`-th (from 1) in a row."""
    first = max(settings.retry_wait_seconds, _MIN_WAIT_SECONDS)
    longest = min(first * 2 ** min(place - 1, _MAX_DOUBLINGS), _MAX_WAIT_SECONDS)
    return longest * random.uniform(0.5, 1.0)
