"""Where the main thread of a rank stands, and since when: tells an exchange that nobody answers from a long phase."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

PATIENT_PHASES = frozenset({"start", "rollout", "evaluate"})
"""What rank 0 may do for as long as it takes, while the others wait for it outside of any exchange."""
_OWN = "moerl."


class Standstill:
    """Looks at one thread now and then. A phase that goes on is seen in other places; a wait in one place only.

    No frame is kept, only code and positions in it: a frame would keep its tensors.
    """

    def __init__(self, thread_id: int | None = None) -> None:
        """Of the thread that makes it, or of `thread_id`."""
        self._thread_id = threading.get_ident() if thread_id is None else thread_id
        self._stack: tuple[Any, ...] | None = None
        self._since = 0.0
        self._waits_for_leader = False
        self.place = ""
        """Where the thread was seen last: `module:line (function)` of moerl, then of the library it is inside of."""
        self.is_patient = True
        """Whether it could wait there as long as it liked."""

    @contextmanager
    def patient(self) -> Iterator[None]:
        """The thread waits here for rank 0, which may take as long as it likes."""
        self._waits_for_leader = True
        try:
            yield
        finally:
            self._waits_for_leader = False

    def look(self, now: float, phase: str, entered: int) -> float:
        """Seconds for which the thread was seen in one place of one phase; 0 where it may wait as long as it likes."""
        stack, self.place = _stack(sys._current_frames().get(self._thread_id))
        self.is_patient = self._waits_for_leader or phase in PATIENT_PHASES
        seen = (entered, stack)
        if seen != self._stack or self.is_patient:
            self._stack, self._since = seen, now
        return now - self._since


def _stack(frame: FrameType | None) -> tuple[tuple[tuple[CodeType, int], ...], str]:
    """(every frame's code and position in it, the innermost place of moerl and of all)."""
    positions, innermost, own = [], "", ""
    while frame is not None:
        positions.append((frame.f_code, frame.f_lasti))
        module = str(frame.f_globals.get("__name__"))
        if not innermost or (not own and module.startswith(_OWN)):
            place = f"{module}:{frame.f_lineno} ({frame.f_code.co_name})"
            innermost = innermost or place
            own = place if module.startswith(_OWN) else own
        frame = frame.f_back
    known = [own, f"in {innermost}"] if own and own != innermost else [innermost]
    return tuple(positions), " ".join(known)
