"""Episodes that end when a test says so, with tokens that name the version which sampled them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moerl.rollout.ahead import AheadBuffer, AheadRooms
from moerl.rollout.loop_thread import LoopThread
from moerl.rollout.plan import PlanSettings
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

PROMPT_LENGTH = 2
PATIENCE_SECONDS = 60
TAKER = "taker"
FIRST_TOKEN = 1000
"""Token ids are this plus the version that sampled them."""


class Draws:
    """Prompts p/0, p/1, ...: none comes twice, so that an id names one draw."""

    def __init__(self) -> None:
        self.cursor = 0

    def next_prompts(self, count: int) -> list[Prompt]:
        self.cursor += count
        return [self.find(f"p/{row}") for row in range(self.cursor - count, self.cursor)]

    def find(self, prompt_id: str) -> Prompt:
        return Prompt(prompt_id, np.arange(PROMPT_LENGTH, dtype=np.int32), None, "p", env="play")

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor = state["cursor"]


@dataclass
class Request:
    """An episode under way."""

    prompt_id: str
    index: int
    step: int
    number: int
    versions: list[int]
    """That it has run under so far."""
    answer: asyncio.Future[Trajectory] = field(repr=False)


class Scheduled:
    """Keeps `Play`."""

    def __init__(self) -> None:
        self.version = 0
        self.waiting: dict[int, Request] = {}
        self.asked: list[Request] = []
        self.fail: Exception | None = None

    async def __call__(
        self, prompt: Prompt, index: int, *, step: int, params: SamplingParams, number: int | None = None
    ) -> Trajectory:
        assert number is not None
        if self.fail is not None:
            raise self.fail
        answer = asyncio.get_running_loop().create_future()
        request = Request(prompt.prompt_id, index, step, number, [self.version], answer)
        assert number not in self.waiting
        self.waiting[number] = request
        self.asked.append(request)
        try:
            return await answer
        finally:
            del self.waiting[number]

    def update(self, version: int) -> None:
        """New weights: what runs goes on with them."""
        self.version = version
        for request in self.waiting.values():
            request.versions.append(version)


def trajectory_of(versions: Sequence[int], *, status: str = "ok", reward: float = 1.0) -> Trajectory:
    """One token for each entry of `versions`, in their order."""
    length = PROMPT_LENGTH + len(versions)
    spans: list[tuple[int, int, int]] = []
    for place, version in enumerate(versions, PROMPT_LENGTH):
        start = spans.pop()[0] if spans and spans[-1][2] == version else place
        spans.append((start, place + 1, version))
    return Trajectory(
        token_ids=np.concatenate([np.arange(PROMPT_LENGTH), FIRST_TOKEN + np.array(versions, dtype=int)]).astype(
            np.int32
        ),
        loss_mask=np.arange(length) >= PROMPT_LENGTH,
        rollout_logprobs=np.zeros(length, dtype=np.float32),
        temperature=1.0,
        finish_reason="stop",
        version_spans=tuple(spans),
        status=status,  # pyright: ignore[reportArgumentType]
        error="" if status == "ok" else "TimeoutError: no end",
        reward=reward if status == "ok" else float("nan"),
    )


def refuse_mixtures(trajectory: Trajectory) -> None:
    """Every sampled token is in the span of the version that it names, and only those are."""
    said = np.full(len(trajectory.token_ids), -1)
    for start, end, version in trajectory.version_spans:
        assert (said[start:end] == -1).all(), "spans overlap"
        said[start:end] = version
    sampled = np.where(trajectory.loss_mask, trajectory.token_ids - FIRST_TOKEN, -1)
    assert said.tolist() == sampled.tolist()


class MarkedThread(LoopThread):
    """Says when a call from the thread `TAKER` has begun on the loop and when it has ended there."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ended = threading.Event(), threading.Event()

    def run(self, coro: Coroutine[Any, Any, Any], /) -> Any:
        if threading.current_thread().name != TAKER:
            return super().run(coro)

        async def marked() -> Any:
            self.begun.set()
            try:
                return await coro
            finally:
                self.ended.set()

        return super().run(marked())


class Take:
    """A call of `take` in a thread of its own."""

    def __init__(self, bench: Bench, step: int, version: int) -> None:
        self._bench = bench
        self._future: Future[Any] = Future()
        bench.thread.begun.clear()
        bench.thread.ended.clear()
        self._thread = threading.Thread(target=self._run, args=(step, version), name=TAKER, daemon=True)
        self._thread.start()
        assert bench.thread.begun.wait(PATIENCE_SECONDS)
        bench.settle()

    def _run(self, step: int, version: int) -> None:
        try:
            self._future.set_result(self._bench.buffer.take(step, version))
        except BaseException as error:  # noqa: BLE001  raised again by `result`
            self._future.set_exception(error)

    def done(self) -> bool:
        """Whether it has got what it waited for, once the bench has settled; the same for the same moves."""
        return self._bench.thread.ended.is_set()

    def result(self) -> Any:
        return self._future.result(PATIENCE_SECONDS)


async def _turns() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


class Bench:
    """A buffer on its thread, the engine's side in the test's hands."""

    def __init__(
        self,
        settings: PlanSettings,
        *,
        group_size: int = 1,
        group_filter: Callable[[RolloutGroup], str | None] | None = None,
        max_error_fraction: float = 1.0,
        source: Any = None,
    ) -> None:
        self.thread = MarkedThread()
        self.source = source or Draws()
        self.play = Scheduled()
        self.observed: list[str] = []
        rooms = AheadRooms(
            thread=self.thread,
            source=self.source,
            find=self.source.find,
            play=self.play,
            params=SamplingParams(4),
            group_filter=group_filter,
            observe=lambda group: self.observed.append(group.prompt.prompt_id),
        )
        self.buffer = AheadBuffer(rooms, settings, group_size=group_size, max_error_fraction=max_error_fraction)

    def publish(self, version: int) -> None:
        self.play.update(version)
        self.buffer.published(version)
        self.settle()

    def settle(self) -> None:
        """Until nothing on the loop has anything left to do."""

        self.thread.run(_turns())

    def waiting(self) -> list[Request]:
        return sorted(self.play.waiting.values(), key=lambda request: request.number)

    def finish(self, request: Request, trajectory: Trajectory | None = None) -> None:
        """Under the versions it ran with, one token each, unless told otherwise."""
        self.finish_several([(request, trajectory or trajectory_of(request.versions))])

    def finish_several(self, answers: Sequence[tuple[Request, Trajectory]]) -> None:
        async def resolve() -> None:
            for request, trajectory in answers:
                request.answer.set_result(trajectory)
            await _turns()

        self.thread.run(resolve())

    def finish_all(self) -> None:
        while self.play.waiting:
            for request in self.waiting():
                self.finish(request)

    def close(self) -> None:
        self.thread.close()
