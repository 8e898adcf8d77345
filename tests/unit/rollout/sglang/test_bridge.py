"""Calls from one event loop to another: every outcome comes back, and loops are woken for many at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from moerl.rollout.sglang.bridge import Bridge

COUNT = 500


class Counted(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    num_wakes = 0

    def call_soon_threadsafe(self, callback, *args, context=None):
        self.num_wakes += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


@pytest.fixture
def there() -> Iterator[Counted]:
    loop = Counted()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


async def double(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(f"{number} is below 0")
    return 2 * number


def test_every_outcome_comes_back_to_who_asked_and_wakes_are_few(there):
    bridge = Bridge(there)
    seen: set[int] = set()

    async def asked(number: int) -> int:
        async def on_loop() -> int:
            seen.add(threading.get_ident())
            return await double(number)

        return await bridge.run(on_loop())

    async def main() -> list[int]:
        return await asyncio.gather(*(asked(number) for number in range(COUNT)))

    with asyncio.Runner(loop_factory=Counted) as runner:
        assert runner.run(main()) == [2 * number for number in range(COUNT)]
        here = runner.get_loop()
        assert isinstance(here, Counted)
        assert there.num_wakes + here.num_wakes < COUNT / 2
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_errors_come_back_as_they_are(there):
    bridge = Bridge(there)

    async def main() -> int:
        with pytest.raises(ValueError, match="-3 is below 0"):
            await bridge.run(double(-3))
        return await bridge.run(double(3))

    assert asyncio.run(main()) == 6


def test_several_loops_at_once_and_one_after_the_other(there):
    bridge = Bridge(there)
    found: dict[int, list[int]] = {}

    def work(first: int) -> None:
        async def main() -> list[int]:
            return await asyncio.gather(*(bridge.run(double(number)) for number in range(first, first + 50)))

        found[first] = asyncio.run(main())

    for _ in range(3):
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert found == {first: [2 * n for n in range(first, first + 50)] for first in (0, 100, 200)}
        found.clear()
    assert len(bridge._mailboxes) <= 4, "those of closed loops go"


@pytest.mark.parametrize("waits", [True, False], ids=["under way", "not begun"])
def test_cancelling_here_cancels_there(there, waits):
    bridge = Bridge(there)
    begun, ended = threading.Event(), threading.Event()

    async def long() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.create_task(bridge.run(long()))
        await asyncio.sleep(0)
        if waits:
            await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    if waits or begun.is_set():
        assert ended.wait(20)

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    assert asyncio.run(bridge.run(tasks())) == 1


def test_what_is_cancelled_there_is_cancelled_here(there):
    bridge = Bridge(there)

    async def gives_up() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await bridge.run(gives_up())

    asyncio.run(main())


def test_a_closed_loop_is_an_error_and_leaves_no_coroutine_behind():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(Bridge(loop).run(double(1)))


def test_a_bridge_that_is_shut_starts_what_waits_and_refuses_what_comes(there):
    """Otherwise a call in the moment of closing would wait for ever."""
    bridge = Bridge(there)

    async def shut() -> None:
        bridge.shut()

    async def main() -> list[int | BaseException]:
        calls = [asyncio.create_task(bridge.run(double(number))) for number in range(COUNT)]
        await asyncio.sleep(0)
        closing = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(shut(), there))
        await closing
        bridge.flush()
        with pytest.raises(RuntimeError, match="takes no more work"):
            await bridge.run(double(1))
        async with asyncio.timeout(20):
            return await asyncio.gather(*calls, return_exceptions=True)

    assert asyncio.run(main()) == [2 * number for number in range(COUNT)]
