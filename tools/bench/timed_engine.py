"""A rollout engine that takes time and no processor: answers of long-tailed lengths, a token at a time, in slots.

It stands for an engine on hardware of its own. `slots` requests run at once, one token each every `token_seconds`; the
others wait. Lengths are log-normal, cut at the budget, and belong to a request's seed. Tokens, logprobs and routes mean
nothing: what is measured is when things happen. At a weight update what runs is waited for, or aborted and continued.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

import numpy as np

from moerl.rollout.engine import engines
from moerl.types import Completion, SamplingParams, WeightBucket

TOKEN = 5
"""What it writes."""


@dataclass(frozen=True)
class TimedEngineConfig:
    """Arguments of `rollout.engine: {name: "timed_engine:timed"}`."""

    slots: int = 64
    token_seconds: float = 0.002
    median_tokens: float = 12.0
    sigma: float = 1.0
    """Of the logarithm of lengths."""
    pause_mode: str = "abort"
    """`abort` or `wait`."""
    precision: str = "int4"
    """What the step-0 contract is told: logprobs are made up, so nothing of it is held."""


@engines.register("timed", TimedEngineConfig, injects=())
class TimedEngine:
    """Keeps `RolloutEngine`."""

    busy_seconds = 0.0
    """Of all slots of all engines of this process, so that who runs a whole training can read it afterwards."""

    def __init__(self, cfg: TimedEngineConfig) -> None:
        self.policy_version = 0
        self._cfg = cfg
        self._slots = asyncio.Semaphore(cfg.slots)
        self._running = 0
        self._may_run, self._paused, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._may_run.set()
        self._idle.set()
        self._done: dict[str, int] = {}
        """Tokens of requests that were aborted, so that the whole answer keeps its length."""

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        """Wait for a slot, then for the tokens."""
        del token_ids
        done = self._done.pop(request_id, 0)
        wanted = self._length(params.seed - done, params.max_new_tokens + done) - done
        while True:
            await self._may_run.wait()
            async with self._slots:
                if self._may_run.is_set():
                    return await self._run(wanted, done, request_id)

    async def _run(self, wanted: int, done: int, request_id: str) -> Completion:
        start, version = time.perf_counter(), self.policy_version
        self._running += 1
        self._idle.clear()
        count, reason = wanted, "stop"
        try:
            if self._cfg.pause_mode == "wait":
                await asyncio.sleep(wanted * self._cfg.token_seconds)
            else:
                count = await self._until_paused(wanted)
        finally:
            type(self).busy_seconds += time.perf_counter() - start
            self._running -= 1
            if not self._running:
                self._idle.set()
        if count < wanted:
            reason = "abort"
            self._done[request_id] = done + count
        tokens = np.full(count, TOKEN, dtype=np.int32)
        return Completion(tokens, np.full(count, -1.0, dtype=np.float32), reason, version)

    async def _until_paused(self, wanted: int) -> int:
        """Tokens that were sampled before an update, at least one."""
        start = time.perf_counter()
        try:
            async with asyncio.timeout(wanted * self._cfg.token_seconds):
                await self._paused.wait()
        except TimeoutError:
            return wanted
        return max(1, min(wanted, int((time.perf_counter() - start) / self._cfg.token_seconds)))

    def _length(self, seed: int, most: int) -> int:
        drawn = np.random.default_rng(seed % 2**63).lognormal(math.log(self._cfg.median_tokens), self._cfg.sigma)
        return int(min(max(1.0, drawn), most))

    async def pause(self) -> None:
        """Abort or wait for what runs; nothing new starts."""
        self._may_run.clear()
        self._paused.set()
        await self._idle.wait()

    async def resume(self) -> None:
        """Start again."""
        self._paused.clear()
        self._may_run.set()

    async def update_weights(self, bucket: WeightBucket) -> None:
        """The version is all that is kept."""
        if bucket.is_last:
            self.policy_version = bucket.version

    async def set_memory(self, *, released: bool) -> None:
        """There is none."""
        del released

    def close(self) -> None:
        """Nothing is open."""
