"""An episode's time limit: times in which the engine could serve nobody do not count, all others do."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from moerl.rollout.collect import Collector
from moerl.rollout.deadline import Deadline
from moerl.types import Prompt, SamplingParams, Trajectory

LIMIT = 0.05


def test_without_stalls_it_is_a_time_limit():
    async def main():
        deadline = Deadline(LIMIT, lambda: 7.0)
        with pytest.raises(TimeoutError):
            async with deadline:
                await asyncio.Event().wait()
        return deadline.expired()

    assert asyncio.run(main())


def test_it_does_not_expire_while_time_is_stalled_and_does_after_that():
    async def main():
        loop = asyncio.get_running_loop()
        start, is_over = loop.time(), asyncio.Event()

        def stalled():
            seconds = loop.time() - start
            if seconds > 1.0:
                is_over.set()
            return min(seconds, 1.0)

        async def wait():
            await is_over.wait()
            await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            async with Deadline(LIMIT, stalled):
                await wait()
        return is_over.is_set()

    assert asyncio.run(main())


def test_what_ends_in_time_leaves_nothing_behind():
    async def main():
        async with Deadline(LIMIT, lambda: 0.0) as deadline:
            pass
        await asyncio.sleep(2 * LIMIT)
        assert not deadline.expired()
        with pytest.raises(KeyError):
            async with Deadline(LIMIT, lambda: 0.0):
                raise KeyError("its own")

    asyncio.run(main())


class Stalled:
    """An engine that can serve nobody from its making on."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    @property
    def stalled_seconds(self) -> float:
        return time.monotonic() - self.start


class Slow:
    """An environment that takes longer than the limit."""

    async def run(self, prompt, engine, params, request_id):
        await asyncio.sleep(10 * LIMIT)
        return Trajectory(
            token_ids=np.array([1, 2], np.int32),
            loss_mask=np.array([False, True]),
            rollout_logprobs=np.zeros(2, np.float32),
            temperature=1.0,
            finish_reason="stop",
            version_spans=((1, 2, 0),),
        )


class Passes:
    async def score(self, prompt, trajectory):
        return trajectory


@pytest.mark.parametrize(("engine", "status"), [(Stalled, "ok"), (object, "error")])
def test_an_episode_is_not_late_for_want_of_servers(engine, status):
    collector = Collector(
        engine=engine(), environments={"slow": Slow()}, scorer=Passes(), run_seed=0, timeout_seconds=LIMIT
    )
    try:
        prompt = Prompt("p/0", np.array([1], np.int32), None, "p", env="slow")
        (group,) = collector.collect([prompt], step=1, group_size=1, params=SamplingParams(1))
    finally:
        collector.close()
    assert group.trajectories[0].status == status
    assert ("no end within 0.05 s" in group.trajectories[0].error) == (status == "error")
