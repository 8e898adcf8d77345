"""The in-process engine: batching, versions, whole-or-nothing updates, pausing, cancelling, closing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moerl.checksums import checksum
from moerl.errors import CheckpointError, RolloutError, WeightSyncError
from moerl.rollout.engines.local_engine import LocalEngine, LocalEngineConfig
from moerl.types import SamplingParams, Support, TopLogprobs, WeightBucket


@dataclass(frozen=True)
class Echo:
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str = "stop"
    routes: np.ndarray | None = None
    support: Support | None = None
    top_logprobs: TopLogprobs | None = None


class EchoSampler:
    """Keeps TextSampler: answers with the prompt's last token plus the weight `w`; records batches; can be held up."""

    def __init__(self) -> None:
        self.weight = 0
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.fail: Exception | None = None

    def load_weights(self, weights) -> None:
        given = dict(weights)
        if set(given) != {"a", "w"}:
            raise CheckpointError(f"weights are incomplete: {sorted(given)}")
        self.weight = int(given["w"])

    def check_request(self, prompt, params) -> None:
        if len(prompt) == 0:
            raise RolloutError("prompt is empty")

    def generate(self, prompts, params):
        self.batches.append([int(p[-1]) for p in prompts])
        weight = self.weight
        self.started.set()
        self.gate.wait(10)
        if self.fail is not None:
            raise self.fail
        return [Echo(np.array([p[-1] + weight]), np.array([-0.5], dtype=np.float32)) for p in prompts]


def bucket(version: int, *, last: bool, **tensors: float) -> WeightBucket:
    named = [(name, torch.tensor(value)) for name, value in tensors.items()]
    return WeightBucket(version, named, last, checksum(named))


@pytest.fixture
def sampler():
    return EchoSampler()


@pytest.fixture
def engine(sampler):
    engine = LocalEngine(LocalEngineConfig(max_batch_size=8), sampler=sampler)
    yield engine
    sampler.gate.set()
    engine.close()


def ask(engine: LocalEngine, token: int):
    return engine.generate(np.array([token]), SamplingParams(4), f"d/0#{token}")


async def ask_all(engine: LocalEngine, tokens):
    return [int(c.token_ids[0]) for c in await asyncio.gather(*(ask(engine, t) for t in tokens))]


def test_concurrent_requests_are_one_batch_and_answers_find_their_request(engine, sampler):
    assert asyncio.run(ask_all(engine, range(7))) == list(range(7))
    assert sampler.batches == [list(range(7))]


def test_requests_that_come_a_few_turns_later_still_join(engine, sampler):
    async def late(token: int) -> int:
        for _ in range(token):
            await asyncio.sleep(0)
        return int((await ask(engine, token)).token_ids[0])

    async def main() -> list[int]:
        return list(await asyncio.gather(*(late(t) for t in range(6))))

    assert asyncio.run(main()) == list(range(6))
    assert sampler.batches == [list(range(6))]


def test_batches_are_bounded_and_keep_the_order_of_arrival(engine, sampler):
    assert asyncio.run(ask_all(engine, range(20))) == list(range(20))
    assert sampler.batches == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


def test_one_engine_serves_one_event_loop_after_another(engine):
    for _ in range(3):
        assert asyncio.run(ask_all(engine, [5])) == [5]


def test_the_version_rises_with_the_last_bucket_only(engine, sampler):
    async def main() -> None:
        await engine.update_weights(bucket(3, last=False, a=0.0))
        assert engine.policy_version == 0
        assert (await ask(engine, 1)).policy_version == 0
        await engine.update_weights(bucket(3, last=True, w=10.0))
        answer = await ask(engine, 1)
        assert (engine.policy_version, answer.policy_version, int(answer.token_ids[0])) == (3, 3, 11)

    asyncio.run(main())


def test_a_batch_that_runs_keeps_its_version_and_the_swap_waits(engine, sampler):
    async def main() -> None:
        sampler.gate.clear()
        asked = asyncio.create_task(ask(engine, 1))
        await asyncio.to_thread(sampler.started.wait, 10)
        update = asyncio.create_task(engine.update_weights(bucket(1, last=True, a=0.0, w=10.0)))
        await asyncio.sleep(0.02)
        assert not update.done()
        sampler.gate.set()
        await update
        assert (await asked).policy_version == 0
        assert (await ask(engine, 1)).policy_version == 1

    asyncio.run(main())


def _damaged() -> WeightBucket:
    good = bucket(2, last=True, a=0.0, w=9.0)
    return WeightBucket(2, [("a", torch.tensor(0.0)), ("w", torch.tensor(8.0))], True, good.checksum)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([_damaged()], "checksum"),
        ([bucket(2, last=True, w=9.0)], r"incomplete: \['w'\]"),
        ([bucket(2, last=False, w=9.0), bucket(2, last=True, a=0.0, w=9.0)], "w was sent twice"),
        ([bucket(0, last=True, a=0.0, w=9.0)], "version 1 is already served"),
        ([bucket(2, last=False, w=9.0), bucket(3, last=True, a=0.0)], r"incomplete: \['a'\]"),
    ],
    ids=["damaged", "incomplete", "twice", "older", "mixed"],
)
def test_a_bad_update_leaves_the_old_weights_and_the_next_one_works(engine, sampler, bad, message):
    async def main() -> None:
        await engine.update_weights(bucket(1, last=True, a=0.0, w=5.0))
        for part in bad[:-1]:
            await engine.update_weights(part)
        with pytest.raises(WeightSyncError, match=message) as caught:
            await engine.update_weights(bad[-1])
        assert "version 1 goes on serving" in str(caught.value)
        answer = await ask(engine, 1)
        assert (answer.policy_version, int(answer.token_ids[0])) == (1, 6)
        await engine.update_weights(bucket(4, last=True, a=0.0, w=7.0))
        assert (await ask(engine, 1)).policy_version == 4

    asyncio.run(main())


def test_an_update_that_was_never_finished_is_dropped_for_a_newer_one(engine):
    async def main() -> None:
        await engine.update_weights(bucket(1, last=False, w=5.0))
        await engine.update_weights(bucket(2, last=True, a=0.0, w=7.0))
        answer = await ask(engine, 1)
        assert (answer.policy_version, int(answer.token_ids[0])) == (2, 8)

    asyncio.run(main())


def test_the_same_version_may_come_again(engine):
    async def main() -> None:
        await engine.update_weights(bucket(0, last=True, a=0.0, w=2.0))
        assert int((await ask(engine, 1)).token_ids[0]) == 3

    asyncio.run(main())


def test_pause_lets_the_running_batch_end_and_holds_the_rest(engine, sampler):
    async def main() -> None:
        sampler.gate.clear()
        running = asyncio.create_task(ask(engine, 1))
        await asyncio.to_thread(sampler.started.wait, 10)
        held = asyncio.create_task(ask(engine, 2))
        pause = asyncio.create_task(engine.pause())
        await asyncio.sleep(0.02)
        assert not pause.done()
        sampler.gate.set()
        await pause
        assert int((await running).token_ids[0]) == 1
        for _ in range(20):
            await asyncio.sleep(0)
        assert not held.done()
        assert sampler.batches == [[1]]
        await engine.resume()
        assert int((await held).token_ids[0]) == 2

    asyncio.run(main())


def test_a_cancelled_request_leaves_the_others_alone(engine, sampler):
    async def main() -> None:
        await engine.pause()
        tasks = [asyncio.create_task(ask(engine, t)) for t in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        await engine.resume()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[1], asyncio.CancelledError)
        assert [int(answers[i].token_ids[0]) for i in (0, 2)] == [0, 2]

    asyncio.run(main())
    assert sampler.batches == [[0, 2]]


def test_a_request_cancelled_while_it_runs_leaves_the_others_alone(engine, sampler):
    async def main() -> None:
        sampler.gate.clear()
        tasks = [asyncio.create_task(ask(engine, t)) for t in range(2)]
        await asyncio.to_thread(sampler.started.wait, 10)
        tasks[0].cancel()
        await asyncio.sleep(0)
        sampler.gate.set()
        assert int((await tasks[1]).token_ids[0]) == 1

    asyncio.run(main())


def test_a_loop_that_dies_with_requests_waiting_does_not_poison_the_next(engine, sampler):
    async def abandoned() -> None:
        sampler.gate.clear()
        asyncio.get_running_loop().create_task(ask(engine, 1)).add_done_callback(lambda t: t.cancelled())
        await asyncio.to_thread(sampler.started.wait, 10)
        asyncio.get_running_loop().create_task(ask(engine, 2)).add_done_callback(lambda t: t.cancelled())
        await asyncio.sleep(0)
        sampler.gate.set()

    asyncio.run(abandoned())
    assert asyncio.run(ask_all(engine, [3, 4])) == [3, 4]


def test_one_bad_request_is_refused_alone_and_named(engine):
    async def main():
        bad = engine.generate(np.array([], dtype=np.int64), SamplingParams(4), "d/7#3")
        return await asyncio.gather(ask(engine, 1), bad, ask(engine, 2), return_exceptions=True)

    first, refused, second = asyncio.run(main())
    assert (int(first.token_ids[0]), int(second.token_ids[0])) == (1, 2)
    assert isinstance(refused, RolloutError)
    assert "request d/7#3: prompt is empty" in str(refused)


def test_a_batch_that_fails_tells_every_request_and_the_engine_lives_on(engine, sampler):
    async def main():
        return await asyncio.gather(ask(engine, 1), ask(engine, 2), return_exceptions=True)

    sampler.fail = RolloutError("logits are not finite")
    answers = asyncio.run(main())
    assert [str(a) for a in answers] == [f"request d/0#{i}: logits are not finite" for i in (1, 2)]
    sampler.fail = MemoryError("no room")
    answers = asyncio.run(main())
    assert all(isinstance(a, MemoryError) for a in answers)
    sampler.fail = None
    assert asyncio.run(ask_all(engine, [4])) == [4]


def test_released_memory_refuses_until_it_is_taken_again(engine):
    async def main() -> None:
        await engine.set_memory(released=True)
        with pytest.raises(RolloutError, match="memory is released"):
            await ask(engine, 1)
        await engine.set_memory(released=False)
        assert int((await ask(engine, 1)).token_ids[0]) == 1

    asyncio.run(main())


def test_close_refuses_and_can_be_repeated(engine):
    engine.close()
    engine.close()
    with pytest.raises(RolloutError, match="engine is closed"):
        asyncio.run(ask_all(engine, [1]))


def test_close_cancels_what_waits(engine):
    async def main() -> None:
        await engine.pause()
        held = asyncio.create_task(ask(engine, 1))
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(asyncio.CancelledError):
            await held

    asyncio.run(main())


def test_a_batch_size_of_nothing_is_refused(sampler):
    with pytest.raises(RolloutError, match="max_batch_size=0"):
        LocalEngine(LocalEngineConfig(max_batch_size=0), sampler=sampler)
