"""Starts servers anew that a run launched itself and that have ended or hang; one at a time, and where they may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from moerl.rollout.sglang.nodes import Launched


class Restarts:
    """Of the servers of one engine; `count` says how many there were."""

    def __init__(self, launched: Launched, is_forbidden: Callable[[], bool]) -> None:
        """`is_forbidden`, asked in any thread: a server that starts would take memory that another works in."""
        self._launched = launched
        self._is_forbidden = is_forbidden
        self._lock = threading.Lock()
        self.count = 0

    async def revive(self, index: int, *, is_hung: bool) -> bool:
        """Start it if its process is dead, or if it answered nothing for so long that it hangs; True where it was.

        Raises:
            RolloutError: it did not come up, or they were closed.
        """
        return await asyncio.to_thread(self._restart, index, is_hung)

    async def settle(self) -> None:
        """Wait for a start that is under way, whatever becomes of it."""
        await asyncio.to_thread(self._wait)

    def _restart(self, index: int, is_hung: bool) -> bool:
        if not self._is_due(index, is_hung):  # before the lock: a server that lives waits for no other's start
            return False
        with self._lock:
            if not self._is_due(index, is_hung):
                return False
            self._launched.restart(index)
            self.count += 1
            return True

    def _is_due(self, index: int, is_hung: bool) -> bool:
        return not self._is_forbidden() and (is_hung or index in self._launched.dead())

    def _wait(self) -> None:
        with self._lock:
            pass
