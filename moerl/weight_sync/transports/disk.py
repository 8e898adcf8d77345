"""Through a folder that trainer and servers share: buckets become safetensors files, servers load the folder.

Staged: no server is touched before the version is whole. A server that fails while it loads may hold a mixture (SGLang
0.5.23 loads the new path again where it means to go back to the old one), so it is reported as failed and gets the last
whole version again before it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from moerl.errors import ConfigError, WeightSyncError, is_lost
from moerl.types import WeightBucket
from moerl.weight_sync.servers import Failures, SenderPlace, WeightServer, differing, on_each, shape_of
from moerl.weight_sync.transport import HandOver, transports
from moerl.weight_sync.version_folder import VersionFolder


@dataclass(frozen=True)
class DiskConfig:
    """Arguments of `weight_sync.transport: {name: disk}`."""

    check_every: int = 100
    """The first update and every so many-th is checked: files read back, servers compared with one another; 0: none."""

    def __post_init__(self) -> None:
        check_interval(self.check_every)


def check_interval(value: int) -> None:
    """Raise ConfigError for one that is none."""
    if value < 0:
        raise ConfigError(f"weight_sync.transport.check_every is {value}, but must be 0 (never) or more")


class DiskSender:
    """Sends to servers that read the same folder."""

    is_staged = True
    keeps = True

    def __init__(self, cfg: DiskConfig, place: SenderPlace) -> None:
        """Nothing is written yet."""
        self._cfg = cfg
        self._versions = VersionFolder(place)
        self._num_updates = 0

    async def send(self, bucket: WeightBucket, servers: Sequence[WeightServer]) -> Failures:
        """Write one file.

        Raises:
            WeightSyncError: the disk refuses.
        """
        del servers
        await asyncio.to_thread(self._versions.write, bucket, with_sum=self._is_checked)
        return {}

    async def commit(self, version: int, servers: Sequence[WeightServer]) -> Failures:
        """Name the folder, and have every server load it at once; the folder before it goes once one has.

        Where no server refused, but all were lost or there were none, the next one to come loads it.

        Raises:
            WeightSyncError: the disk refuses, or does not hold what was written.
        """
        path = await asyncio.to_thread(self._versions.finish, version)
        if self._is_checked:
            await asyncio.to_thread(self._versions.read_back, version)
        loaded, failures = await on_each(servers, lambda server: load(server, str(path), version))
        if self._is_checked:
            failures |= await self._compare(list(loaded))
        if len(failures) < len(servers) or all(is_lost(error) for error in failures.values()):
            await asyncio.to_thread(self._versions.keep, version)
            self._num_updates += 1
        return failures

    async def give_up(self, servers: Sequence[WeightServer]) -> None:
        """Remove what was written since the last commit."""
        del servers
        await asyncio.to_thread(self._versions.drop)

    def has(self, version: int) -> bool:
        """Whether its folder is there."""
        return self._versions.version == version

    async def replay(self, server: WeightServer, version: int) -> bool:
        """Load the folder of `version` again, if it is there."""
        if not self.has(version):
            return False
        await load(server, str(self._versions.path(version)), version)
        return True

    def close(self) -> None:
        """Remove the folder."""
        self._versions.close()

    @property
    def _is_checked(self) -> bool:
        return self._cfg.check_every > 0 and self._num_updates % self._cfg.check_every == 0

    async def _compare(self, servers: Sequence[WeightServer]) -> Failures:
        """Servers that cut the model the same way must hold the same; the first of each cut is the measure."""
        sums, failures = await on_each(servers, lambda server: server.checksum())
        first: dict[tuple[tuple[str, ...], ...], WeightServer] = {}
        for server, seen in sums.items():
            measure = first.setdefault(shape_of(seen), server)
            wrong = differing(seen, sums[measure])
            if wrong:
                failures[server] = WeightSyncError(
                    f"{server.url} loaded other weights than {measure.url} from one folder ({', '.join(wrong[:3])}); "
                    "check that both read the same disk"
                )
        return failures


async def load(server: WeightServer, path: str, version: int) -> None:
    """A folder, under its version; the cache is flushed once at the end of the whole update."""
    await server.update_from_disk(path, weight_version=version, flush_cache=False, keep_pause=True)


@transports.register("disk", DiskConfig, sender=DiskSender)
class Disk(HandOver):
    """The engines' senders do it."""
