"""The ranks of a run as a team: what rank 0 knows reaches the others as bytes, over gloo and on the CPU.

Tensors of the learner go their own ways (`parallel.py`); here go samples, decisions and signs of life. Nothing is
pickled.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moerl.config.schema import ParallelSection
from moerl.errors import MoerlError, PeerError, exit_status
from moerl.mcore.parallel import join_world
from moerl.mcore.watch import Watch, say
from moerl.mcore.wire import gather_json
from moerl.protocols import Team
from moerl.world import Alone, World

POINT = "point"
"""Key of how many times the leader has come to where the others wait for it."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.05
_BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
"""What the message of a failed exchange holds; gloo raises the bare RuntimeError."""


class ProcessTeam:
    """Keeps `Team` over processes that torchrun started. A context manager: what fails inside ends every rank."""

    def __init__(self, world: World, section: ParallelSection) -> None:
        """Join the process group and start to watch."""
        join_world(section)
        self._world = world
        self.rank, self.size = world.rank, world.size
        self.is_leader = world.rank == 0
        self._timeout = timedelta(seconds=section.timeout_seconds)
        self._group = self._new_group(range(self.size))
        self._store = _store()
        self._points = 0
        if self.is_leader:
            self._store.set(POINT, "0")
        self._parts: dict[int, dist.ProcessGroup] = {}
        """By data-parallel rank: its ranks and the leader, where this rank is one of them."""
        self._part = 0
        signal.signal(signal.SIGTERM, _leave)
        ends_silently = dist.get_backend() == "nccl"  # torch then ends a process whose exchange takes too long
        limit = section.timeout_seconds if ends_silently else None
        self._watch = Watch(_store(), world, section.silence_seconds, exchange_seconds=limit)
        dist.barrier(self._group)
        self._watch.start()

    @property
    def world(self) -> World:
        """Where this rank is."""
        return self._world

    def board(self) -> StoreBoard:
        """Texts under keys, on a connection of its own to the launcher's store."""
        return StoreBoard(PrefixStore("board", _store()))

    def split(self, data_rank: int) -> None:
        """Say which data-parallel rank this one belongs to, before the first `deliver`."""
        of_ranks: list[int] = gather_json(data_rank)
        self._part = data_rank
        for group in self._parts.values():  # of another layout: its threads would stay
            dist.destroy_process_group(group)
        self._parts = {}
        for part in range(max(of_ranks) + 1):
            members = [0, *(rank for rank, own in enumerate(of_ranks) if own == part and rank)]
            group = self._new_group(members) if len(members) > 1 else None
            if group is not None:
                self._parts[part] = group

    def begin(self, step: int) -> None:
        """This rank is at `step`."""
        self._watch.begin(step)

    def phase(self, name: str) -> None:
        """And in this part of it."""
        self._watch.phase(name)

    def meet(self) -> None:
        """Wait until every rank is here."""
        self._follow()
        dist.barrier(self._group)

    def any(self, flag: bool) -> bool:
        """Whether it is True on any rank."""
        self._follow()
        value = torch.tensor([int(flag)], device="cpu")
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value)

    def spread(self, data: bytes | None) -> bytes:
        """The leader's `data`, on every rank."""
        self._follow()
        return self._broadcast(data or b"", self._group)

    def deliver(self, part_of: Callable[[int], bytes]) -> bytes:
        """What the leader's `part_of` says for the data-parallel rank of this one; the leader itself gets nothing."""
        self._follow()
        mine = b""
        for part, group in self._parts.items():
            received = self._broadcast(part_of(part) if self.is_leader else b"", group)
            mine = received if part == self._part else mine
        return b"" if self.is_leader else mine

    def _follow(self) -> None:
        """Wait for the leader outside of any exchange: it may sample for longer than an exchange may take."""
        self._points += 1
        if self.is_leader:
            self._watch.refuse_fault()
            self._store.set(POINT, str(self._points))
            return
        pause = FIRST_PAUSE_SECONDS
        with self._watch.patient():
            while int(self._store.get(POINT)) < self._points:
                self._watch.refuse_fault()
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _new_group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """None on ranks outside; every rank calls it."""
        group = dist.new_group(list(ranks), backend="gloo", timeout=self._timeout)
        return group if isinstance(group, dist.ProcessGroup) else None

    def _broadcast(self, data: bytes, group: dist.ProcessGroup | None) -> bytes:
        size = torch.tensor([len(data)], device="cpu")
        dist.broadcast(size, src=0, group=group)
        if not int(size):
            return b""
        buffer = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        if self.is_leader:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=group)
        return data if self.is_leader else buffer.numpy().tobytes()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tell the other ranks of an error, or leave it to the one that told first.

        Raises:
            PeerError: another rank has told of a fault.
        """
        try:
            if error is not None and not isinstance(error, PeerError):
                self._tell(error)
        finally:
            self._watch.close(is_well=error is None)

    def _tell(self, error: BaseException) -> None:
        if _is_broken_exchange(error):
            raise self._watch.explain(error) from None
        text = f"rank {self.rank} failed {self._watch.where()} with {type(error).__name__}: {error}"
        status = self._watch.claim(text, exit_status(error))
        if status is not None:
            raise PeerError(status) from error
        if not isinstance(error, MoerlError | KeyboardInterrupt):
            say(text)


class StoreBoard:
    """Keeps `Board` over a store of torch's. Any thread may call."""

    def __init__(self, store: Store) -> None:
        """`store` is used from here alone: a connection has one call at a time."""
        self._store = store
        self._lock = threading.Lock()

    def put(self, key: str, text: str) -> None:
        """Write it, over what was there.

        Raises:
            RuntimeError: the store's process has ended.
        """
        with self._lock:
            self._store.set(key, text)

    def look(self, key: str) -> str | None:
        """What is there; None: nothing yet. At once.

        Raises:
            RuntimeError: the store's process has ended.
        """
        with self._lock:
            return bytes(self._store.get(key)).decode() if self._store.check([key]) else None


def joined(world: World, section: ParallelSection) -> Team:
    """The team of this process; a context manager."""
    return Alone() if world.is_alone else ProcessTeam(world, section)


def _leave(number: int, frame: FrameType | None) -> None:
    """SIGTERM outside of the loop: end, but not while an error is on its way, as the launcher sends it for one."""
    del number, frame
    if sys.exc_info()[1] is None:
        raise KeyboardInterrupt


def _store() -> Store:
    """A connection to the launcher's store, under keys of this attempt alone."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore(f"moerl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _is_broken_exchange(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _BROKEN)
