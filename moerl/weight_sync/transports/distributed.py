"""Into servers anywhere, by a broadcast from the trainer: gloo on CPUs, NCCL on GPUs.

The group has this process as rank 0, then the servers' tensor ranks, server by server. It is built at the first update
and again whenever the servers are others than those that built it, or something broke. A server that is lost in the
middle of a bucket costs the others nothing but that bucket, which they get again in a group without it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.errors import ConfigError, MoerlError, WeightSyncError, is_lost
from moerl.weight_sync.flat import FlatEntry
from moerl.weight_sync.live import LiveSender, default_device
from moerl.weight_sync.servers import (
    Failures,
    SenderPlace,
    ServerLostError,
    WeightServer,
    first_address,
    is_here,
    is_loopback,
    on_each,
)
from moerl.weight_sync.transport import HandOver, transports
from moerl.weight_sync.transports.disk import check_interval
from moerl.weight_sync.update_group import BACKENDS, Rendezvous, UpdateGroup

_SETTLE_SECONDS = 1.0
"""After a failure: an answer may have come just before the last bytes were taken."""
_GRACE_SECONDS = 15.0
"""What is left of a bucket after something broke: answers of the others, and the broadcast's own end."""


@dataclass(frozen=True)
class DistributedConfig:
    """Arguments of `weight_sync.transport: {name: distributed}`."""

    backend: str = "auto"
    """`gloo`, `nccl`, or `auto`: nccl where this process has a GPU."""
    address: str = "127.0.0.1"
    """Of this machine, as the servers reach it; nothing listens on another. `node`: as the launcher names this machine
    to the run's other nodes."""
    port: int = 0
    """Where the ranks meet; 0: a free one."""
    timeout_seconds: float = 120.0
    """Longest for the group to come together, and for one broadcast."""
    check_every: int = 100
    """The first update and every so many-th is compared with a load of the same version from the disk; 0: none."""
    keep_copy: bool = False
    """Write every version to the disk too, so that a server that was started anew need not wait for the next update."""

    def __post_init__(self) -> None:
        check_interval(self.check_every)
        where, faults = "weight_sync.transport", []
        if self.backend not in ("auto", *BACKENDS):
            faults.append(f"{where}.backend is {self.backend!r}, but must be one of auto, {', '.join(BACKENDS)}")
        if not 0 <= self.port < 65536:
            faults.append(f"{where}.port is {self.port}, but must be 0 (any free one) to 65535")
        if not self.timeout_seconds > 0:
            faults.append(f"{where}.timeout_seconds is {self.timeout_seconds}, but must be above 0")
        if faults:
            raise ConfigError(*faults)


class DistributedSender(LiveSender):
    """Sends to servers that can reach this process."""

    def __init__(self, cfg: DistributedConfig, place: SenderPlace) -> None:
        """Nothing listens yet."""
        super().__init__(place, check_every=cfg.check_every, keep_copy=cfg.keep_copy)
        self._cfg = cfg
        self._address = first_address() if cfg.address == "node" else cfg.address
        self._backend = cfg.backend
        if cfg.backend == "auto":
            self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._token = secrets.token_hex(4)
        self._num_groups = 0
        self._group: UpdateGroup | None = None
        self._members: list[WeightServer] = []

    async def replay(self, server: WeightServer, version: int) -> bool:
        """As `LiveSender`; a server that needs it was started anew, and is in no group."""
        await self._leave([one for one in self._members if one is not server])
        return await super().replay(server, version)

    async def give_up(self, servers: Sequence[WeightServer]) -> None:
        """The group goes too: nobody knows what state its ranks are in."""
        await self._leave(servers)
        await super().give_up(servers)

    def close(self) -> None:
        """Close the group's connections; servers note it when they are next asked."""
        if self._group is not None:
            self._group.leave()
        self._group = None
        super().close()

    def _allocate(self, num_bytes: int) -> Tensor:
        device = default_device() if self._backend == "nccl" else torch.device("cpu")
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    async def _deliver(
        self, entries: Sequence[FlatEntry], flat: Tensor, servers: Sequence[WeightServer], label: int | None
    ) -> Failures:
        left, failures = list(servers), Failures()
        while left:
            broken = await self._join(left) or await self._broadcast(entries, flat, left, label)
            if not broken.failures:
                return failures
            await self._leave([server for server in left if server not in broken.failures])
            failures |= broken.blamed
            left = [server for server in left if server not in broken.blamed]  # what they took already does no harm
        return failures

    async def _join(self, servers: list[WeightServer]) -> _Broken | None:
        """Build the group of exactly these servers, unless it is there."""
        if self._group is not None and self._members == servers:
            return None
        await self._leave(self._members)
        await asyncio.to_thread(self._refuse_others_machines, servers)
        infos, failures = await on_each(servers, lambda server: server.server_info())
        if failures:
            return _Broken(failures, failures)
        sizes = [infos[server].tensor_size for server in servers]
        limit, world = self._cfg.timeout_seconds, 1 + sum(sizes)
        meeting = Rendezvous(self._address, self._cfg.port, timeout_seconds=limit)
        name = f"moerl-{self._token}-{self._num_groups}"
        self._num_groups += 1
        options = {"name": name, "world_size": world, "backend": self._backend, "timeout_seconds": limit}
        own = asyncio.create_task(asyncio.to_thread(UpdateGroup, meeting, **options))
        posts = {
            server: asyncio.create_task(
                server.init_group(
                    master_address=meeting.address,
                    master_port=meeting.port,
                    rank_offset=1 + sum(sizes[:number]),
                    world_size=world,
                    group_name=name,
                    backend=self._backend,
                )
            )
            for number, server in enumerate(servers)
        }
        broken = await _both(own, posts, call_off=meeting.call_off)
        if broken.failures:
            meeting.call_off()
            return broken
        self._group, self._members, self._name = own.result(), servers, name
        return None

    def _refuse_others_machines(self, servers: Sequence[WeightServer]) -> None:
        """Where nobody but this machine could join: a server elsewhere waits for its own for many minutes."""
        if not is_loopback(self._address):
            return
        for server in servers:
            if not is_here(server.url):
                raise WeightSyncError(
                    f"weight_sync.transport.address is {self._address}, which only this machine can reach, but "
                    f"{server.url} is on another one: set it to this machine's address as that one reaches it"
                )

    async def _leave(self, servers: Sequence[WeightServer]) -> None:
        """Drop the group here first, so that ranks that wait in it are let go, then at the servers that live."""
        if self._group is None:
            return
        self._group.leave()
        self._group, self._members = None, []
        name = self._name
        await on_each(servers, lambda server: _in_time(server, server.destroy_group(name)))

    async def _broadcast(
        self, entries: Sequence[FlatEntry], flat: Tensor, servers: Sequence[WeightServer], label: int | None
    ) -> _Broken:
        group = self._group
        assert group is not None
        named = [(entry.name, entry.dtype_name, entry.shape) for entry in entries]
        posts = {
            server: asyncio.create_task(
                server.update_from_distributed(
                    named, group_name=self._name, load_format="flattened_bucket", weight_version=label
                )
            )
            for server in servers
        }
        own = asyncio.create_task(asyncio.to_thread(group.broadcast, flat))
        broken = await _both(own, posts, call_off=group.abort)
        if not own.done():
            self._buffer = None  # its thread still reads it
        return broken


@dataclass(frozen=True)
class _Broken:
    """What went wrong in something that all ranks do together."""

    failures: Failures
    blamed: Failures
    """Those that began it; the others' failures follow from theirs. Not empty unless `failures` is."""


async def _both(
    own: asyncio.Task[UpdateGroup] | asyncio.Task[None],
    posts: Mapping[WeightServer, asyncio.Task[None]],
    call_off: Callable[[], None],
) -> _Broken:
    """Wait for this process's part and for the servers' answers; after the first failure for a short time only."""
    done, pending = await asyncio.wait({own, *posts.values()}, return_when=asyncio.FIRST_EXCEPTION)
    early = {server for server, task in posts.items() if task in done and task.exception() is not None}
    if pending:  # something failed
        _, pending = await asyncio.wait(pending, timeout=_SETTLE_SECONDS)
    if own in pending:
        await asyncio.to_thread(call_off)
        await asyncio.wait({own}, timeout=_SETTLE_SECONDS)
        pending.discard(own)
    if pending:
        await asyncio.wait(pending, timeout=_GRACE_SECONDS)
    failures, silent = Failures(), set[WeightServer]()
    for server, task in posts.items():
        if not task.done():
            task.cancel()
            failures[server] = ServerLostError(f"{server.url} did not answer after the group of weight updates broke")
            silent.add(server)
        elif (error := task.exception()) is not None:
            failures[server] = _expected(error)
    own.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may end when nobody waits any more
    if own.done() and (error := own.exception()) is not None and not failures:
        failures = Failures(dict.fromkeys(posts, _expected(error)))
    lost = {server for server, error in failures.items() if is_lost(error)} - silent
    blamed = lost or early or silent or set(failures)
    return _Broken(failures, {server: failures[server] for server in failures if server in blamed})


def _expected(error: BaseException) -> MoerlError:
    if not isinstance(error, MoerlError):
        raise error
    return error


async def _in_time(server: WeightServer, call: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(call, _GRACE_SECONDS)
    except TimeoutError as error:
        raise ServerLostError(f"{server.url} did not leave the group of weight updates") from error


@transports.register("distributed", DistributedConfig, sender=DistributedSender)
class Distributed(HandOver):
    """The engines' senders do it."""
