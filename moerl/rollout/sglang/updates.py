"""A weight update of all servers as one transaction, and the release of their memory: no request meets a mixture.

    pause -> [first bucket ... last bucket: send, commit, labels checked, cache flushed] -> resume

How buckets travel is a `WeightSender`'s business. One that is staged touches no server before `commit`, so an update
that was given up leaves every server as it was. With one that is not, servers hold a mixture from the first bucket on;
after a failure they serve nothing until a whole update has come.

Servers that die cost time, not the run: where all are lost the update goes on without them if its weights are kept,
and they get them when they come back. A server that lives and refuses is an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from moerl.checksums import verify_bucket
from moerl.errors import MoerlError, RolloutError, WeightSyncError, is_lost
from moerl.rollout.sglang.client import PauseMode, SglangClient
from moerl.rollout.sglang.dispatcher import PAUSED, Dispatcher
from moerl.rollout.sglang.faults import ServerError
from moerl.rollout.sglang.lending import TAGS, Lending
from moerl.rollout.sglang.pool import Member
from moerl.types import WeightBucket

logger = logging.getLogger(__name__)

RELEASED, MIXED = "memory is released", "weights are a mixture"
"""Reasons of a shut gate."""

_RECALL_SECONDS = 15.0
"""For a server that is out to say that it is paused."""
_RECALL_PAUSE_SECONDS = 1.0
"""Before servers that are out are asked again, where the update cannot begin without one."""

_LOST = (
    "nobody keeps these weights for servers that come back: see the servers' logs, resume the run from its last "
    "checkpoint, and set weight_sync.transport.keep_copy=true, or weight_sync.transport=disk, with which it costs time"
)


class WeightSender(Protocol):
    """Brings buckets to servers. Every call names the servers that are fit at that moment."""

    @property
    def is_staged(self) -> bool:
        """Whether servers keep their old weights until `commit`."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether the update under way, or else the next one, can be sent again once it is committed."""
        ...

    def has(self, version: int) -> bool:
        """Whether `replay` can send it."""
        ...

    async def send(self, bucket: WeightBucket, clients: Sequence[SglangClient]) -> Mapping[SglangClient, MoerlError]:
        """Take one bucket, the last one too; returns the servers that failed, which get no more of this update.

        The trainer may change its tensors as soon as this returns.

        Raises:
            MoerlError: nobody took it.
        """
        ...

    async def commit(self, version: int, clients: Sequence[SglangClient]) -> Mapping[SglangClient, MoerlError]:
        """After the last bucket: the servers serve it under the label `str(version)`; returns those that failed.

        With `keeps` it is there for `replay` unless a server refused it and none took it, also where there are none.
        """
        ...

    async def give_up(self, clients: Sequence[SglangClient]) -> None:
        """Forget the buckets since the last commit, and close what is open at the servers. Raises nothing of theirs."""
        ...

    async def replay(self, client: SglangClient, version: int) -> bool:
        """Give one server the weights of `version`, the last commit, again; False where that cannot be done."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class Updates:
    """State of updates and memory over one dispatcher; its calls come one at a time, on the dispatcher's loop."""

    def __init__(
        self, dispatcher: Dispatcher, sender: WeightSender, *, pause_mode: PauseMode, wait_seconds: float = 0.0
    ) -> None:
        """`wait_seconds`: how long an update whose weights are not kept waits for a first server to send it to."""
        self._dispatcher = dispatcher
        self._sender = sender
        self._wait_seconds = wait_seconds
        self._mode: PauseMode = pause_mode
        self._is_paused = False
        self._open_version: int | None = None
        self._names: set[str] = set()
        self._needs_cache = False
        """Weights were taken back and the cache not yet: it comes after the next update."""
        self._lending = Lending()
        self._lock = asyncio.Lock()
        """Held from the recall of servers to the commit, or to the end of giving up; and while one is sent its weights
        again: an old version must not come between two buckets."""
        self._has_lock = False
        self.num_updates = 0

    async def pause(self) -> None:
        """Stop all servers as the mode says; a second pause does nothing. Without a fit server it is a shut gate."""
        if not self._is_paused:
            await self._dispatcher.pause(self._mode)
            self._is_paused = True

    async def resume(self) -> None:
        """Drop an update that is not whole, and go on; with servers that hold a mixture nothing goes on.

        Raises:
            RolloutError: none goes on, and one refused, or nobody has the weights of now any more.
        """
        if self._open_version is not None:
            await self._give_up()
        if self._dispatcher.pool.shut_by <= {PAUSED}:
            self._is_paused = False
            was_served = bool(self._dispatcher.pool.fit)
            await self._dispatcher.resume()
            if was_served and self._dispatcher.is_published:
                self._refuse_lost_weights(self._dispatcher.policy_version)

    async def take(self, bucket: WeightBucket) -> None:
        """One bucket; with the last one the version rises.

        Raises:
            WeightSyncError: a damaged bucket, a version below the present one, a name sent twice, no server took it
                and one refused, or all were lost and the weights with them.
        """
        version = self._dispatcher.policy_version
        try:
            is_first = self._open_version is None
            self._check(bucket)
            if not self._sender.is_staged and not self._is_paused:
                await self.pause()
            if not self._sender.is_staged and is_first:
                await self._take_lock()
                self._dispatcher.pool.shut(MIXED)
                await self._find_servers()
            if not self._sender.is_staged:
                self._dispatcher.pool.shut(MIXED)
                self._refuse_nobody()
            self._drop(await self._sender.send(bucket, self._clients()), is_kept=self._sender.keeps)
            if bucket.is_last:
                await self._commit(bucket.version)
        except MoerlError as error:
            await self._give_up()
            raise WeightSyncError(
                f"update to version {bucket.version} failed ({error}); {self._state(version)}"
            ) from error

    async def release_memory(self) -> None:
        """Give cache and weights back; what runs is aborted first and goes on later."""
        self._dispatcher.pool.shut(RELEASED)
        self._needs_cache = False
        await self._dispatcher.pause("abort")
        self._is_paused = True
        await self._dispatcher.on_each(self._lending.lend, "release memory")

    async def release_rest(self) -> None:
        """Of servers that are out too, as far as they answer: they are on the same devices.

        One that the watch is about is waited for: it would take its memory again, or die of a token without weights.
        """

        async def ask(member: Member) -> None:
            async with member.lock:
                try:
                    async with asyncio.timeout(_RECALL_SECONDS):
                        await member.client.pause("abort")
                        await self._lending.lend(member.client)
                except (MoerlError, TimeoutError) as error:
                    logger.info("%s, which is out, did not release its memory (%s)", member.name, error)

        await asyncio.gather(*(ask(member) for member in self._dispatcher.pool.members if member.state == "out"))

    async def take_memory(self) -> None:
        """Take the weights' memory; the cache's comes with the next update, before which nothing is served.

        Where no server is fit nothing is taken: those that come back have their memory, or are asked then.
        """
        if self._dispatcher.pool.fit:
            await self._dispatcher.on_each(lambda client: self._lending.take_back(client, ("weights",)), "take memory")
        self._needs_cache = True
        self._is_paused = False  # whoever updates next pauses for itself, or `_commit` goes on

    async def regain(self, client: SglangClient) -> None:
        """For the watch: what a server that comes back has not yet taken again, before anything runs there."""
        await self._lending.take_back(client, TAGS)

    async def give_back(self) -> None:
        """The run ends, and servers that go on have their memory again. Raises nothing of theirs."""
        await self._lending.give_back()

    def note_restart(self, client: SglangClient) -> None:
        """Its process is a new one: with all of its memory, and the weights of its start, whatever their label says."""
        self._lending.forget(client)
        for member in self._dispatcher.pool.members:
            if member.client is client and self._dispatcher.is_published:
                member.must_replay = True

    @property
    def is_released(self) -> bool:
        """Whether memory was given back and not taken again."""
        return RELEASED in self._dispatcher.pool.shut_by and not self._needs_cache

    @property
    def is_shut(self) -> bool:
        """Whether servers hold a part of an update that failed, and serve nothing until a whole one has come."""
        return MIXED in self._dispatcher.pool.shut_by

    async def replay(self, client: SglangClient) -> bool:
        """For the watch: the weights of now, to one server that came back. False too where an update is under way."""
        pool = self._dispatcher.pool
        if pool.shut_by:
            return False
        async with self._lock:
            if pool.shut_by or any(member.client is client for member in pool.fit):
                return False
            await self._lending.take_back(client, TAGS)  # or they would go under the label of what it lends
            return await self._sender.replay(client, self._dispatcher.policy_version)

    async def _take_lock(self) -> None:
        if not self._has_lock:
            await self._lock.acquire()
            self._has_lock = True
            await self._dispatcher.on_each(self._lending.look, "say whose label it has")

    def _leave_lock(self) -> None:
        if self._has_lock:
            self._has_lock = False
            self._lock.release()

    def _check(self, bucket: WeightBucket) -> None:
        if self._open_version not in (None, bucket.version):
            raise WeightSyncError(f"buckets of version {self._open_version} were never finished")
        if bucket.version < self._dispatcher.policy_version:
            raise WeightSyncError(f"version {self._dispatcher.policy_version} is already served; versions only rise")
        verify_bucket(bucket)
        self._open_version = bucket.version
        for name, _ in bucket.tensors:
            if name in self._names:
                raise WeightSyncError(f"{name} was sent twice")
            self._names.add(name)

    async def _commit(self, version: int) -> None:
        """Serve the new weights, and nothing computed from the old ones."""
        was_paused = self._is_paused
        await self.pause()
        await self._take_lock()
        is_kept = self._sender.keeps
        self._drop(await self._sender.commit(version, self._clients()), is_kept=is_kept)
        await self._dispatcher.on_each(lambda client: self._lending.end(client, version), f"take version {version}")
        await self._dispatcher.on_each(self._flush, "flush its cache")
        self._refuse_lost_weights(version)
        self._needs_cache = False
        self._dispatcher.policy_version = version
        self._dispatcher.is_published = True
        self._open_version, self._names = None, set()
        self.num_updates += 1
        for reason in (MIXED, RELEASED):
            self._dispatcher.pool.open(reason)
        self._leave_lock()
        if not was_paused:
            await self.resume()

    async def _flush(self, client: SglangClient) -> None:
        """Old weights made the cached prefixes. Under `in_place` a server that is busy refuses."""
        try:
            await client.flush_cache(max_attempts=1 if self._mode == "in_place" else 5)
        except ServerError as error:
            if self._mode != "in_place" or error.kind != "refused":
                raise
            logger.warning("%s kept prefixes of older weights: requests run (pause_mode in_place)", client.url)

    async def _give_up(self) -> None:
        self._open_version, self._names = None, set()
        try:
            await self._sender.give_up(self._clients())
            if MIXED in self._dispatcher.pool.shut_by:
                await self._restore()
        finally:
            self._leave_lock()

    async def _find_servers(self) -> None:
        """Those that are out are recalled; where the weights have nowhere to go, until there is one."""
        end = time.monotonic() + self._wait_seconds
        while not await self._recall() and not self._dispatcher.pool.fit and not self._sender.keeps:
            if time.monotonic() > end:
                return
            await asyncio.sleep(min(_RECALL_PAUSE_SECONDS, self._wait_seconds))

    async def _recall(self) -> bool:
        """Servers that are out for want of weights, and answer, get the whole update with the others.

        True where one came, which may be a new process: what is open from the update before is closed.
        """

        async def ask(member: Member) -> None:
            try:
                async with asyncio.timeout(_RECALL_SECONDS):
                    await member.client.pause(self._mode)
                    await self._lending.take_back(member.client, ("weights",))
            except (MoerlError, TimeoutError) as error:
                logger.info("%s stays out of the update (%s)", member.name, error)
                return
            self._dispatcher.pool.readmit(member)

        asked = [member for member in self._dispatcher.pool.members if member.state == "out"]
        await asyncio.gather(*(ask(member) for member in asked))
        has_come = any(member.state == "fit" for member in asked)
        if has_come:
            await self._sender.give_up(self._clients())
        return has_come

    async def _restore(self) -> None:
        """Servers that got a part of an update get the last whole one again, or stay shut."""
        for client in self._clients():
            try:
                is_whole = await self._sender.replay(client, self._dispatcher.policy_version)
            except MoerlError as error:
                logger.error("%s did not take its old weights again (%s)", client.url, error)
                is_whole = False
            if not is_whole:
                return
        self._dispatcher.pool.open(MIXED)

    def _drop(self, failures: Mapping[SglangClient, MoerlError], *, is_kept: bool) -> None:
        for member in self._dispatcher.pool.fit:
            if member.client in failures:
                self._dispatcher.eject(member, f"it did not take the update ({failures[member.client]})")
        refused = [error for error in failures.values() if not is_lost(error)]
        if failures and not self._dispatcher.pool.fit and (refused or not is_kept):
            words = "" if refused else f"; {_LOST}"
            raise RolloutError(f"no server took the update: {[*refused, *failures.values()][0]}{words}")

    def _refuse_nobody(self) -> None:
        if not self._dispatcher.pool.fit and not self._sender.keeps:
            waited = f" after {self._wait_seconds:g} s" if self._wait_seconds else ""
            raise RolloutError(f"no server is fit to take it{waited}: {self._why_out()}")

    def _refuse_lost_weights(self, version: int) -> None:
        """Servers that come back would wait for a version that nobody can send them."""
        if not self._dispatcher.pool.fit and not self._sender.has(version):
            raise RolloutError(f"every server was lost after it took version {version} ({self._why_out()}); {_LOST}")

    def _why_out(self) -> str:
        return "; ".join(f"{member.name}: {member.why_out}" for member in self._dispatcher.pool.members)

    def _clients(self) -> list[SglangClient]:
        return [member.client for member in self._dispatcher.pool.fit]

    def _state(self, version: int) -> str:
        if MIXED in self._dispatcher.pool.shut_by:
            return "servers hold a part of it and serve nothing until a whole update has come: publish again"
        if not self._dispatcher.pool.fit:
            return "no server serves"
        return f"version {version} goes on serving"
