"""Calls from other event loops to one that runs in a thread of its own, carried over in batches.

`asyncio.run_coroutine_threadsafe` wakes the other thread for every call, and wakes this one for every result; under a
load of hundreds of requests that costs as much processor time as the requests. Here a call waits in a list until the
loop gets to it, a result likewise, and a loop is woken only where nothing waits for it yet.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

REST_SECONDS = 0.005
"""Between two wakes of a loop, under load; a call that comes alone waits for nothing."""


class _Mailbox:
    """Work for one loop, from running loops of other threads; `loop` is woken once for all that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._emptied = 0.0
        self._is_shut = False
        self._lock = threading.Lock()

    def put(self, work: Callable[[], None]) -> None:
        """Have the loop do it, at once or together with what else comes within `REST_SECONDS` of the last time.

        Raises:
            RuntimeError: the loop is closed, or takes no more.
        """
        with self._lock:
            if self._is_shut:
                raise RuntimeError("the loop takes no more work")
            self._waiting.append(work)
        if self._is_woken:
            return
        self._is_woken = True  # two threads may both come here: the second wake finds nothing
        rest = self._emptied + REST_SECONDS - time.monotonic()
        if rest <= 0:
            self._loop.call_soon_threadsafe(self._empty)
        else:
            asyncio.get_running_loop().call_later(rest, self.wake)

    def shut(self) -> None:
        """In the loop: do what waits; nothing is taken any more."""
        with self._lock:
            self._is_shut = True
        self._empty()

    def put_now(self, work: Callable[[], None]) -> None:
        """Have the loop do it at once, and what waits; nothing where it is closed. From any thread."""
        self._waiting.append(work)
        self.wake()

    def wake(self) -> None:
        """Have the loop look now."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._emptied = time.monotonic()
        self._is_woken = False  # first: what is put from now on wakes the loop again
        while self._waiting:
            self._waiting.popleft()()


class _Call:
    """One call on its way: the coroutine runs as a task there, its outcome goes to a future here."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], future: asyncio.Future[Any], back: _Mailbox) -> None:
        self._coroutine = coroutine
        self._future = future
        self._back = back
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    def start(self) -> None:
        """In the loop that runs it."""
        if self._is_cancelled:
            self._coroutine.close()
            return
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._send_back)

    def cancel(self) -> None:
        """In the loop that runs it."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _send_back(self, task: asyncio.Task[Any]) -> None:
        if self._is_cancelled:
            if not task.cancelled():
                task.exception()  # nobody waits for it any more
            return
        try:
            self._back.put(self._deliver)
        except RuntimeError:  # the loop that asked is closed
            return

    def _deliver(self) -> None:
        """In the loop that asked."""
        assert self._task is not None
        if self._future.done():
            return
        if self._task.cancelled():
            self._future.cancel()
        elif (error := self._task.exception()) is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._task.result())


class Bridge:
    """To one loop, from any number of others."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` runs in another thread than those that call."""
        self._there = _Mailbox(loop)
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}
        self._lock = threading.Lock()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The outcome of `coroutine` there; cancelling here cancels it there, and does not wait for that.

        Raises:
            RuntimeError: the loop there is closed, or was shut.
        """
        here = asyncio.get_running_loop()
        future: asyncio.Future[T] = here.create_future()
        call = _Call(coroutine, future, self._mailboxes.get(here) or self._new_mailbox(here))
        try:
            self._there.put(call.start)
        except RuntimeError:
            coroutine.close()
            raise
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                self._there.put_now(call.cancel)  # this loop may end before a rest is over

    def shut(self) -> None:
        """In the loop there: start what was asked for, so that it can be cancelled, and refuse what comes later."""
        self._there.shut()

    def flush(self) -> None:
        """Send back at once what is done; before the loop there stops."""
        for mailbox in self._mailboxes.values():
            mailbox.wake()

    def _new_mailbox(self, here: asyncio.AbstractEventLoop) -> _Mailbox:
        """Of a loop that asks for the first time; those of loops that are closed go."""
        with self._lock:
            known = {loop: box for loop, box in self._mailboxes.items() if not loop.is_closed()}
            self._mailboxes = {**known, here: _Mailbox(here)}
            return self._mailboxes[here]


def serve_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run it in this thread until it is stopped, then close it and the idle threads that it had work done in."""
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
