"""The loop in a thread: results, errors, items made in the thread that asks, and an end in every state."""

from __future__ import annotations

import asyncio
import threading

import pytest

from moerl.errors import RolloutError
from moerl.rollout.loop_thread import LoopThread


@pytest.fixture
def thread():
    made = LoopThread()
    yield made
    made.close()


def test_a_result_and_an_error_come_back_and_other_work_goes_on(thread):
    reached, go = threading.Event(), asyncio.Event()

    async def beside() -> None:
        reached.set()
        await go.wait()

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(beside())

    async def fail() -> None:
        raise KeyError("x")

    async def name() -> str:
        return threading.current_thread().name

    task = thread.run(start())
    assert thread.run(name()) == "rollout"
    with pytest.raises(KeyError, match="x"):
        thread.run(fail())
    assert reached.is_set()
    assert not task.done()


def test_items_are_made_by_the_caller_one_at_a_time(thread):
    made: list[tuple[str, int]] = []
    eaten: list[int] = []

    def items():
        for i in range(4):
            made.append((threading.current_thread().name, i))
            assert len(eaten) == i, "no item is made before the last one is used"
            yield i

    async def consume(given) -> int:
        for i in given:
            await asyncio.sleep(0)
            eaten.append(i)
        return sum(eaten)

    assert thread.run_fed(consume, items()) == 6
    assert made == [(threading.current_thread().name, i) for i in range(4)]


def test_an_error_of_the_items_travels_and_the_consumer_tidies_up(thread):
    seen: list[str] = []

    def items():
        yield 1
        raise ValueError("the learner's")

    async def consume(given) -> None:
        try:
            for _ in given:
                pass
        except RolloutError as error:
            await asyncio.sleep(0)
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="the learner's"):
        thread.run_fed(consume, items())
    assert seen == ["the thread that makes the items failed or was cut off"]


def test_a_consumer_that_fails_early_ends_the_items(thread):
    async def consume(given) -> None:
        next(given)
        raise KeyError("refused")

    with pytest.raises(KeyError, match="refused"):
        thread.run_fed(consume, iter(int, 1))


def test_closing_cancels_what_runs_and_later_calls_say_so(thread):
    ends: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("tidied")

    async def start() -> object:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task

    task = thread.run(start())
    thread.close()
    thread.close()
    assert ends == ["tidied"]
    assert task.cancelled()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RolloutError, match="the rollout thread is closed"):
        thread.run(start())
    with pytest.raises(RolloutError, match="the rollout thread is closed"):
        thread.run_fed(lambda given: start(), [])
