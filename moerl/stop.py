"""Ctrl-C and SIGTERM: finish the step, save, say how to go on; a second Ctrl-C stops at once."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

ASYNCIO = logging.getLogger("asyncio")


class StopSignal:
    """Context manager that turns the first SIGINT or SIGTERM into a flag the loop reads between steps."""

    def __init__(self, *, is_leader: bool = True, has_launcher: bool = False) -> None:
        """Of several processes the leader speaks, and not of SIGTERM: their launcher sends it when one fails."""
        self.requested = False
        self._has_cut_off = False
        self._tells = (signal.SIGINT,) if has_launcher else (signal.SIGINT, signal.SIGTERM)
        if not is_leader:
            self._tells = ()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take over SIGINT and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give them back.

        Raises:
            KeyboardInterrupt: the second signal cut off what ran on an event loop.
        """
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        ASYNCIO.disabled = False
        if self._has_cut_off and isinstance(error, asyncio.CancelledError):
            raise KeyboardInterrupt from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            self._cut_off()
            return
        self.requested = True
        if number in self._tells:
            logger.warning("%s: stopping after this step; once more stops at once", signal.Signals(number).name)

    def _cut_off(self) -> None:
        """An exception out of nowhere may cost an event loop the one wake-up that a task waits for, and closing the
        loop would then wait for that task for ever. So its tasks are cancelled, by the loop itself.
        """
        ASYNCIO.disabled = True  # it would print a traceback for every task that the interrupt cuts off
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise KeyboardInterrupt from None
        if self._has_cut_off:
            raise KeyboardInterrupt
        self._has_cut_off = True
        loop.call_soon_threadsafe(_cancel_all, loop)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
