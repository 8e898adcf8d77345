"""An event loop in a thread of its own: generation goes on while the thread that made it trains.

Everything that asks an engine runs on this one loop (episodes, evaluation, weight updates), since a connection belongs
to one loop. Anything that uses the learner stays in the calling thread: devices and process groups belong to it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from moerl.errors import RolloutError

T = TypeVar("T")
Item = TypeVar("Item")

TIDY_SECONDS = 30.0
"""For a consumer whose items stop coming, such as a weight update that has engines to resume."""
_END, _CUT_OFF = object(), object()


class LoopRunner(Protocol):
    """What a collector asks of whatever runs its coroutines; `asyncio.Runner` keeps it too."""

    def run(self, coro: Coroutine[Any, Any, T], /) -> T:
        """Run it to its end and return its result."""
        ...

    def close(self) -> None:
        """Cancel what still runs and close the event loop."""
        ...


class LoopThread:
    """Keeps `LoopRunner`. `run` may be called from any thread but its own; what runs beside goes on meanwhile."""

    def __init__(self, name: str = "rollout") -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T], /) -> T:
        """The result of `coro`; an exception in the waiting thread, such as Ctrl-C, cancels it.

        Raises:
            RolloutError: the thread was closed.
        """
        if not self._thread.is_alive():
            coro.close()
            raise RolloutError("the rollout thread is closed; build the run anew")
        future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # does nothing to one that is done

    def run_fed(self, consume: Callable[[Iterator[Item]], Coroutine[Any, Any, T]], items: Iterable[Item]) -> T:
        """Run `consume` on the loop with an iterator whose items are made here, in the calling thread, one at a time.

        An item is made when it is asked for, and the loop waits for it: no more than one is ever held. What `items`
        raises travels out of here, and `consume` is told by a `RolloutError` from its iterator.
        """
        if not self._thread.is_alive():
            raise RolloutError("the rollout thread is closed; build the run anew")
        wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(consume(_handed_over(wanted, made)), self._loop)
        future.add_done_callback(lambda _: wanted.put(False))
        source = iter(items)
        try:
            while wanted.get():
                made.put(next(source, _END))
            return future.result()
        finally:
            if not future.done():  # cut off: the loop must not wait for an item for ever, and the consumer may tidy up
                made.put(_CUT_OFF)
                concurrent.futures.wait([future], TIDY_SECONDS)
                future.cancel()

    def close(self) -> None:
        """Cancel what still runs, wait for that, stop the thread. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


def _handed_over(wanted: queue.SimpleQueue[bool], made: queue.SimpleQueue[Any]) -> Iterator[Any]:
    while True:
        wanted.put(True)
        item = made.get()
        if item is _END:
            return
        if item is _CUT_OFF:
            raise RolloutError("the thread that makes the items failed or was cut off")
        yield item
