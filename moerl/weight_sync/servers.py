"""What a weight sender needs of a rollout server and of the run, and how it asks several servers at once."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from moerl.errors import MoerlError, WeightSyncError
from moerl.world import launched_world

T = TypeVar("T")


class HasTensorSize(Protocol):
    """How a server was started."""

    @property
    def tensor_size(self) -> int:
        """Tensor-parallel ranks."""
        ...


class HasChecksum(Protocol):
    """Of all weights that a server holds."""

    @property
    def engine(self) -> str:
        """Of everything."""
        ...

    @property
    def ranks(self) -> Sequence[Mapping[str, str]]:
        """Per rank: internal tensor name -> checksum."""
        ...


class WeightServer(Protocol):
    """Control endpoints of one server; each raises MoerlError where the server did not do it."""

    @property
    def url(self) -> str:
        """For messages."""
        ...

    async def server_info(self) -> HasTensorSize: ...
    async def checksum(self) -> HasChecksum: ...
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...
    async def update_from_disk(
        self, model_path: str, *, weight_version: int | None, flush_cache: bool, keep_pause: bool
    ) -> None: ...
    async def update_from_tensor(
        self, serialized: Sequence[str], *, load_format: str | None, weight_version: int | None
    ) -> None: ...
    async def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None: ...
    async def update_from_distributed(
        self,
        named: Sequence[tuple[str, str, Sequence[int]]],
        *,
        group_name: str,
        load_format: str | None,
        weight_version: int | None,
    ) -> None: ...
    async def destroy_group(self, group_name: str) -> None: ...


Failures = dict[Any, MoerlError]
"""WeightServer -> what it raised. Servers are told apart by identity."""


class ServerLostError(WeightSyncError):
    """A server that did not answer at all."""

    is_suspect = True


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_here(address: str) -> bool:
    """Whether it is an address of this machine, or a URL with one: something could listen there.

    A name that nobody knows counts as here; whoever connects to it says what is wrong.
    """
    host = urlsplit(address).hostname if "//" in address else address
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError:
        return True
    with socket.socket(family, kind, protocol) as tried:
        try:
            tried.bind(place)
        except OSError:
            return False
    return True


def first_address() -> str:
    """Of the run's first node, as the launcher names it to all; loopback without a launcher.

    Raises:
        WeightSyncError: nobody knows that name.
    """
    head = launched_world().head
    try:
        return str(socket.getaddrinfo(head, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise WeightSyncError(f"MASTER_ADDR is {head}, which has no address here ({error.strerror})") from error


@dataclass(frozen=True)
class SenderPlace:
    """Where a run's weights are handed over."""

    folder: Path
    """For versions on the disk; seen by the servers under the same path."""
    model_path: Path
    """Hugging Face folder with the configuration and the tokenizer."""
    quantisation: Mapping[str, object] | None = None
    """`quantization_config` of what is published; None: it is plain."""


async def on_each(
    servers: Iterable[WeightServer], call: Callable[[Any], Awaitable[T]]
) -> tuple[dict[Any, T], Failures]:
    """(what each server gave, what each of the others raised); all are asked at once, and all are waited for."""
    asked = list(servers)
    results = await asyncio.gather(*(call(server) for server in asked), return_exceptions=True)
    given: dict[Any, T] = {}
    failures: Failures = {}
    for server, result in zip(asked, results, strict=True):
        if isinstance(result, MoerlError):
            failures[server] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            given[server] = result
    return given, failures


def differing(one: HasChecksum, other: HasChecksum) -> list[str]:
    """`rank 0 name` of every internal tensor that is not the same in both."""
    if one.engine == other.engine:
        return []
    found = []
    for rank, (left, right) in enumerate(zip(one.ranks, other.ranks, strict=True)):
        names = sorted(set(left) | set(right))
        found += [f"rank {rank} {name}" for name in names if left.get(name) != right.get(name)]
    return found or ["the whole"]


def shape_of(checksum: HasChecksum) -> tuple[tuple[str, ...], ...]:
    """Internal names per rank: servers that share it cut the model the same way and are comparable."""
    return tuple(tuple(sorted(rank)) for rank in checksum.ranks)
