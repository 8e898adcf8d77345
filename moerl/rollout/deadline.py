"""A time limit that does not run while nothing could be done about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

_LEAST_SECONDS = 0.5
"""Between two looks while time is stalled."""


class Deadline:
    """`async with Deadline(seconds, stalled)`, as `asyncio.timeout`; what `stalled` grew by does not count."""

    def __init__(self, seconds: float, stalled: Callable[[], float]) -> None:
        """`stalled`: seconds that were lost so far, in all."""
        self._seconds = seconds
        self._stalled = stalled
        self._granted = 0.0
        self._timeout = asyncio.timeout(None)
        self._next: asyncio.TimerHandle | None = None

    def expired(self) -> bool:
        """Whether it cut its block off."""
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        """The time begins."""
        self._granted = self._stalled()
        await self._timeout.__aenter__()
        self._next = asyncio.get_running_loop().call_later(self._seconds, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """It ends.

        Raises:
            TimeoutError: the block was cut off.
        """
        if self._next is not None:
            self._next.cancel()
        return await self._timeout.__aexit__(kind, error, traceback)

    def _look(self) -> None:
        loop, lost = asyncio.get_running_loop(), self._stalled()
        more, self._granted = lost - self._granted, lost
        if more > 0:
            self._next = loop.call_later(max(more, _LEAST_SECONDS), self._look)
        else:
            self._timeout.reschedule(loop.time())
