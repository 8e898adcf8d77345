"""What the transports into servers' memory share: one session per update, a copy on the disk, and the check against it.

From the first bucket to the end of the session servers hold a mixture. The label travels with the last bucket. The
first update and every so many-th is checked: the same version is written to the disk too, every server loads it from
there, and its checksum must be what it was before. The folder of a checked version also serves servers that come back.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from moerl.errors import WeightSyncError, is_lost
from moerl.types import WeightBucket
from moerl.weight_sync.flat import FlatEntry, laid_out, pack
from moerl.weight_sync.servers import Failures, SenderPlace, WeightServer, differing, on_each
from moerl.weight_sync.transports.disk import load
from moerl.weight_sync.version_folder import VersionFolder

logger = logging.getLogger(__name__)


class LiveSender(ABC):
    """One session per update; a subclass brings a packed bucket to the servers. Holds one packed bucket."""

    is_staged = False

    def __init__(self, place: SenderPlace, *, check_every: int, keep_copy: bool) -> None:
        """`keep_copy`: every version is written to the disk too, so that a server that comes back gets it at once."""
        self._versions = VersionFolder(place)
        self._check_every = check_every
        self._keep_copy = keep_copy
        self._num_updates = 0
        self._open_version: int | None = None
        self._buffer: Tensor | None = None

    async def send(self, bucket: WeightBucket, servers: Sequence[WeightServer]) -> Failures:
        """Pack, and deliver to every server; the first bucket opens the servers' sessions.

        Raises:
            WeightSyncError: nobody can take it.
        """
        failures: Failures = {}
        if self._open_version is None:
            _, failures = await on_each(servers, _begin)
            self._open_version = bucket.version
        left = [server for server in servers if server not in failures]
        if self._writes:
            await asyncio.to_thread(self._versions.write, bucket)
        entries, tensors = laid_out(bucket.tensors)
        num_bytes = entries[-1].stop
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = None  # not two at once
            self._buffer = self._allocate(num_bytes)
        await asyncio.to_thread(pack, entries, tensors, self._buffer)
        label = bucket.version if bucket.is_last else None
        return failures | await self._deliver(entries, self._buffer[:num_bytes], left, label)

    async def commit(self, version: int, servers: Sequence[WeightServer]) -> Failures:
        """Close the sessions, and check the update where it is due.

        Raises:
            WeightSyncError: the check failed: no server may serve this.
        """
        if self._buffer is not None and self._buffer.is_cuda:
            self._buffer = None  # on a processor it stays, since first touches of memory cost as much as the copy
        ended, failures = await on_each(servers, lambda server: server.end_update())
        self._open_version = None
        if self._writes:
            await asyncio.to_thread(self._versions.finish, version)
        if self._is_checked:
            failures |= await self._check(version, list(ended))
        await asyncio.to_thread(self._versions.keep, version if self._writes else None)
        self._num_updates += 1
        return failures

    async def give_up(self, servers: Sequence[WeightServer]) -> None:
        """Close the sessions that may be open, and forget the copy that is under way."""
        self._buffer = None
        if self._open_version is not None:
            self._open_version = None
            _, failures = await on_each(servers, lambda server: server.end_update())
            for server, error in failures.items():
                logger.info("%s had no session to close (%s)", server.url, error)
        await asyncio.to_thread(self._versions.drop)

    @property
    def keeps(self) -> bool:
        """Whether the update under way, or else the next one, is written to the disk too."""
        return self._writes

    def has(self, version: int) -> bool:
        """Whether there is a copy of it on the disk."""
        return self._versions.version == version

    async def replay(self, server: WeightServer, version: int) -> bool:
        """From the copy on the disk, if there is one of this version."""
        if not self.has(version):
            return False
        await load(server, str(self._versions.path(version)), version)
        return True

    def close(self) -> None:
        """Release memory and remove what was written."""
        self._buffer = None
        self._versions.close()

    @abstractmethod
    def _allocate(self, num_bytes: int) -> Tensor:
        """Room for a packed bucket, [num_bytes] uint8."""

    @abstractmethod
    async def _deliver(
        self, entries: Sequence[FlatEntry], flat: Tensor, servers: Sequence[WeightServer], label: int | None
    ) -> Failures:
        """Bring `flat` to each server, which has taken it when this returns; `label` None leaves the old one."""

    @property
    def _is_checked(self) -> bool:
        return self._check_every > 0 and self._num_updates % self._check_every == 0

    @property
    def _writes(self) -> bool:
        return self._keep_copy or self._is_checked

    async def _check(self, version: int, servers: Sequence[WeightServer]) -> Failures:
        """Each server against itself after a load of the same version from the disk, whatever its layout."""
        path = str(self._versions.path(version))
        sent, failures = await on_each(servers, lambda server: server.checksum())
        loaded, not_loaded = await on_each(sent, lambda server: load(server, path, version))
        read, not_read = await on_each(loaded, lambda server: server.checksum())
        for server, seen in read.items():
            wrong = differing(sent[server], seen)
            if wrong:
                rest = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
                raise WeightSyncError(
                    f"{server.url} held other weights after the update to version {version} than after a load of the "
                    f"same version from {path}: {', '.join(wrong[:3])}{rest}; use weight_sync.transport=disk, and "
                    "report it"
                )
        return failures | not_loaded | not_read


async def _begin(server: WeightServer) -> None:
    """A session that an update before left open is closed first."""
    _, failed = await on_each([server], lambda one: one.begin_update())
    if not failed:
        return
    _, unended = await on_each([server], lambda one: one.end_update())
    if unended:
        raise failed[server] if is_lost(failed[server]) else unended[server]
    await server.begin_update()


def default_device() -> torch.device:
    """Of packed buckets: the trainer's own GPU, or the processor."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
