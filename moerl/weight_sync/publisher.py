"""Publish weights: pause the engines, stream buckets, raise the version with the last one, resume."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack

from torch import Tensor

from moerl.errors import ConfigError, MoerlError, WeightSyncError
from moerl.metrics import Metrics, Sum
from moerl.protocols import RolloutEngine
from moerl.weight_sync.buckets import make_buckets
from moerl.weight_sync.transport import WeightTransport

logger = logging.getLogger(__name__)

_ENGINE_FAILURES = (MoerlError, OSError, RuntimeError)
"""What an engine or a transport raises; anything else is a defect and travels as it is."""


class Publisher:
    """Brings one policy's weights to a set of engines; never two updates at once."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        transport: WeightTransport,
        bucket_bytes: int,
        *,
        expected_names: Collection[str] | None = None,
        is_summed: bool = True,
    ) -> None:
        """What is published, and to whom.

        Args:
            engines: all that need the policy.
            transport: brings them the buckets.
            bucket_bytes: of one bucket.
            expected_names: exactly the names that every update must have; None leaves that to the engines.
            is_summed: buckets carry checksums. SHA-256 of both sides takes longer than the copy itself, so transports
                out of this process, which read a bucket where it was made and compare the servers' own checksums, go
                without.

        Raises:
            ConfigError: no engines, or a bucket of no bytes.
        """
        if not engines:
            raise ConfigError("a publisher needs at least one rollout engine; set rollout.engine")
        if bucket_bytes < 1:
            raise ConfigError(f"weight_sync.bucket_bytes is {bucket_bytes}; it must be at least 1")
        self._engines = tuple(engines)
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._is_summed = is_summed
        self._expected_names = None if expected_names is None else frozenset(expected_names)
        self._lock = asyncio.Lock()
        self.version: int | None = None
        """Of the last update that all engines took; None before the first."""

    async def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Metrics:
        """Give every engine the weights of `named_tensors` as `version`; returns `perf/sync_seconds` and `sync/bytes`.

        The version rises with the last bucket and only after every name was seen. Whatever goes wrong, the engines are
        resumed, and those that did not take the last bucket keep their old weights and version. An error of
        `named_tensors` itself (the trainer's) is raised as it is. To an engine, resume without the last bucket means
        that the update was given up; the same version may be published again.

        Raises:
            WeightSyncError: an engine or the transport failed, the names are wrong, or `version` does not rise.
        """
        async with self._lock:
            if self.version is not None and version <= self.version:
                raise WeightSyncError(f"version {version} was to be published after {self.version}; versions must rise")
            started = time.perf_counter()
            num_bytes = await self._publish_paused(named_tensors, version)
            self.version = version
            return {"perf/sync_seconds": Sum(time.perf_counter() - started), "sync/bytes": Sum(float(num_bytes))}

    async def _publish_paused(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Stream between pause and resume; every engine is resumed, even one whose pause failed half-way."""
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self._resume_after_failure)
            await self._all("pause", version)
            num_bytes = await self._stream(named_tensors, version)
            on_failure.pop_all()
        await self._all("resume", version)
        return num_bytes

    async def _stream(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> int:
        num_bytes = 0
        buckets = make_buckets(
            named_tensors,
            version=version,
            bucket_bytes=self._bucket_bytes,
            expected_names=self._expected_names,
            is_summed=self._is_summed,
        )
        for number, bucket in enumerate(buckets):
            try:
                await self._transport.send(bucket, self._engines)
            except _ENGINE_FAILURES as error:
                first, last = bucket.tensors[0][0], bucket.tensors[-1][0]
                stage = (
                    "the last bucket, so some engines may hold the new version"
                    if bucket.is_last
                    else f"bucket {number}"
                )
                raise WeightSyncError(
                    f"the update to version {version} failed at {stage} ({first!r} to {last!r}): {error}; "
                    "publish again (engines of which this says nothing go on with the weights they have)"
                ) from error
            num_bytes += sum(tensor.nbytes for _, tensor in bucket.tensors)
        return num_bytes

    async def _all(self, action: str, version: int) -> None:
        """Pause or resume every engine at once; all are tried before an error is raised."""
        calls = [engine.pause() if action == "pause" else engine.resume() for engine in self._engines]
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = {number: result for number, result in enumerate(results) if isinstance(result, BaseException)}
        for failure in failures.values():
            if not isinstance(failure, _ENGINE_FAILURES):
                raise failure
        if failures:
            listed = "; ".join(f"engine {number}: {failure}" for number, failure in failures.items())
            raise WeightSyncError(
                f"cannot {action} {len(failures)} of {len(self._engines)} engines for version {version} ({listed}); "
                "check the engines and publish again"
            ) from next(iter(failures.values()))

    async def _resume_after_failure(self) -> None:
        """Resume, keeping the first error: one that comes on top is only logged."""
        results = await asyncio.gather(*(engine.resume() for engine in self._engines), return_exceptions=True)
        for number, result in enumerate(results):
            if isinstance(result, BaseException):
                logger.error("engine %d did not resume after a failed weight update: %s", number, result)
