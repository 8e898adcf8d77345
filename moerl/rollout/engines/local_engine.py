"""The in-process engine: collects the requests of many coroutines into one batch of an injected sampler."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moerl.checksums import verify_bucket
from moerl.errors import MoerlError, RolloutError, WeightSyncError
from moerl.rollout.engine import SampledText, TextSampler, engines
from moerl.types import Completion, LocalArray, SamplingParams, WeightBucket

logger = logging.getLogger(__name__)

PAUSE_MODES = ("wait", "abort")
_QUIET_TURNS = 2
"""Turns of the event loop without a new request after which a batch starts."""


@dataclass(frozen=True)
class LocalEngineConfig:
    """Arguments of `rollout.engine: {name: local}`."""

    precision: str = "fp32"
    """Fake precision of the sampler's weights: fp32, bf16, int8, fp8 or int4. Read by build.py."""
    max_batch_size: int = 512
    """Most requests in one batch; more wait for the next."""
    pause_mode: str = "wait"
    """At a weight update the running batch is waited for (`wait`), or cut off after its present token (`abort`): what
    is not finished comes back with reason `abort`, and the environment asks to continue it."""


@dataclass(slots=True)
class _Request:
    prompt: np.ndarray
    params: SamplingParams
    request_id: str
    answer: asyncio.Future[Completion]


@engines.register("local", LocalEngineConfig, injects=("sampler", "policy_version"), returns_topk=True)
class LocalEngine:
    """Keeps `RolloutEngine`. One worker thread runs batches and weight changes, one at a time and in order.

    So a completion comes from one version throughout. It may be used from several event loops, one after the other.
    """

    def __init__(self, cfg: LocalEngineConfig, *, sampler: TextSampler, policy_version: int = 0) -> None:
        """`policy_version` is that of the weights which the sampler already holds."""
        if cfg.max_batch_size < 1:
            raise RolloutError(f"rollout.engine.max_batch_size={cfg.max_batch_size} must be 1 or more")
        if cfg.pause_mode not in PAUSE_MODES:
            raise RolloutError(
                f"rollout.engine.pause_mode={cfg.pause_mode!r}, but must be one of {', '.join(PAUSE_MODES)}"
            )
        self._aborts = cfg.pause_mode == "abort"
        self._abort = threading.Event()
        self.policy_version = policy_version
        self._max_batch_size = cfg.max_batch_size
        self._sampler = sampler
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="local-engine")
        self._waiting: deque[_Request] = deque()
        self._drain: asyncio.Task[None] | None = None
        self._running: concurrent.futures.Future[list[Completion]] | None = None
        self._paused = False
        self._released = False
        self._closed = False
        self._staged: dict[str, Tensor] = {}
        self._staged_version: int | None = None

    @property
    def max_concurrency(self) -> int:
        """Requests of one batch."""
        return self._max_batch_size

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        """Continue `token_ids` [s]; while paused, the request waits for `resume`.

        Raises:
            RolloutError: a request that cannot be sampled (names it), a closed engine, or released memory.
        """
        self._refuse_if_gone(request_id)
        try:
            self._sampler.check_request(token_ids, params)
        except RolloutError as error:
            raise RolloutError(f"request {request_id}: {error}") from error
        request = _Request(token_ids, params, request_id, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._start_drain()
        return await request.answer

    async def pause(self) -> None:
        """Let the running batch finish, or cut it off, and start no other."""
        self._paused = True
        if self._aborts:
            self._abort.set()
        if self._running is not None:
            await asyncio.wait([asyncio.wrap_future(self._running)])

    async def resume(self) -> None:
        """Start batches again, with what has waited; an update whose last bucket has not come is dropped."""
        self._forget_update()
        self._abort.clear()
        self._paused = False
        self._start_drain()

    async def update_weights(self, bucket: WeightBucket) -> None:
        """Stage one bucket (its tensors are this engine's own); the last one swaps the model between two batches.

        The version rises with the swap, and only then.

        Raises:
            WeightSyncError: a damaged bucket, a version below the present one, a name sent twice, or an update that is
                not whole. Its staged part is dropped and the old weights go on serving.
        """
        try:
            self._stage(bucket)
            if bucket.is_last:
                staged = self._staged
                job = self._worker.submit(self._swap, staged, bucket.version)
                await asyncio.wrap_future(job)
                self._forget_update()
        except MoerlError as error:
            self._forget_update()
            raise WeightSyncError(
                f"update to version {bucket.version} failed ({error}); version {self.policy_version} goes on serving"
            ) from error

    async def set_memory(self, *, released: bool) -> None:
        """Refuse requests while released. Nothing is freed: a batch's cache dies with it, weights are host memory."""
        if released:
            await self.pause()
        self._released = released
        if not released:
            await self.resume()

    def close(self) -> None:
        """Cancel what waits, let the running batch end, stop the worker thread. A second call does nothing."""
        self._closed = True
        self._abort.set()
        while self._waiting:
            request = self._waiting.popleft()
            loop = request.answer.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(request.answer.cancel)
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _refuse_if_gone(self, request_id: str) -> None:
        if self._closed:
            raise RolloutError(f"request {request_id}: the engine is closed")
        if self._released:
            raise RolloutError(f"request {request_id}: the engine's memory is released; take it again first")

    def _start_drain(self) -> None:
        if self._paused or self._closed or not self._waiting:
            return
        if self._drain is None or self._drain.done():
            self._drain = asyncio.get_running_loop().create_task(self._run_batches())

    async def _run_batches(self) -> None:
        while self._waiting and not self._paused:
            await self._gather_requests()
            size = min(len(self._waiting), self._max_batch_size)
            batch = [request for _ in range(size) if not (request := self._waiting.popleft()).answer.done()]
            if batch:
                await self._run_batch(batch)

    async def _gather_requests(self) -> None:
        """Yield until every coroutine that can run has had its turn to add a request."""
        quiet, seen = 0, len(self._waiting)
        while quiet < _QUIET_TURNS and seen < self._max_batch_size:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)

    async def _run_batch(self, batch: list[_Request]) -> None:
        self._running = self._worker.submit(self._generate, batch)
        job = asyncio.wrap_future(self._running)
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:  # the event loop ends
            for request in batch:
                request.answer.cancel()
            raise
        error = job.exception()
        for place, request in enumerate(batch):
            if request.answer.done():
                continue
            if error is None:
                request.answer.set_result(job.result()[place])
            elif isinstance(error, MoerlError):
                request.answer.set_exception(RolloutError(f"request {request.request_id}: {error}"))
            else:
                request.answer.set_exception(error)

    def _generate(self, batch: list[_Request]) -> list[Completion]:
        """In the worker thread, as is `_swap`: the version cannot change meanwhile."""
        prompts, params = [r.prompt for r in batch], [r.params for r in batch]
        if self._aborts:
            sampled = self._sampler.generate(prompts, params, self._abort.is_set)
        else:
            sampled = self._sampler.generate(prompts, params)
        return [_completion(one, self.policy_version) for one in sampled]

    def _swap(self, weights: dict[str, Tensor], version: int) -> None:
        self._sampler.load_weights(weights.items())
        self.policy_version = version

    def _stage(self, bucket: WeightBucket) -> None:
        if self._staged_version not in (None, bucket.version):
            logger.warning("update to version %s was never finished; dropped", self._staged_version)
            self._forget_update()
        if bucket.version < self.policy_version:
            raise WeightSyncError(f"version {self.policy_version} is already served; versions only rise")
        verify_bucket(bucket)
        self._staged_version = bucket.version
        for name, tensor in bucket.tensors:
            if name in self._staged:
                raise WeightSyncError(f"{name} was sent twice")
            self._staged[name] = tensor.detach()

    def _forget_update(self) -> None:
        self._staged, self._staged_version = {}, None


def _completion(one: SampledText, version: int) -> Completion:
    return Completion(
        token_ids=one.token_ids,
        logprobs=one.logprobs,
        finish_reason=one.finish_reason,
        policy_version=version,
        routed_experts=None if one.routes is None else LocalArray(one.routes),
        support=one.support,
        top_logprobs=one.top_logprobs,
    )
