"""The process group of weight updates: this process is rank 0, the servers' ranks follow. The one file of this room
that calls `torch.distributed`; it shares nothing with the learner's groups.

SGLang's ranks meet at a store, tcp://address:port, under keys that its own helper and torch put prefixes before. Rank
0 builds the same backend over the same keys, without torch's table of groups: so a group that broke can simply be
dropped, and its connections close with it.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed documents its stores, but does not list them in its __all__

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.errors import WeightSyncError

BACKENDS = ("gloo", "nccl")
_POLL_SECONDS = 0.02
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class Rendezvous:
    """The store where the ranks of one group meet; listens on one address from the start."""

    def __init__(self, address: str, port: int, *, timeout_seconds: float) -> None:
        """`port` 0 takes a free one.

        Raises:
            WeightSyncError: the address cannot be listened on.
        """
        self.address = address
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(2048)
        except OSError as error:
            listener.close()
            raise WeightSyncError(
                f"cannot listen on {address}:{port} for the group of weight updates ({error.strerror}); set "
                "weight_sync.transport.address to an address of this machine that the servers reach, and port to a "
                "free one or 0"
            ) from error
        self.port = int(listener.getsockname()[1])
        # torch binds to every interface by itself, so it is given a socket that is bound
        daemon = dist.TCPStore(
            address,
            self.port,
            None,
            True,
            timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.store = _StoreThatCanBeLeft(daemon, timeout_seconds)

    def call_off(self) -> None:
        """End what another thread waits for here, and close the store, so that ranks that wait there fail."""
        self.store.leave()


class _StoreThatCanBeLeft(dist.Store):
    """torch's store, whose own waits no other thread can end. Whoever uses it must hold it in Python too."""

    def __init__(self, inner: dist.TCPStore, timeout_seconds: float) -> None:
        super().__init__()
        self._inner: dist.TCPStore | None = inner
        self._timeout_seconds = timeout_seconds
        self._is_left = threading.Event()

    def leave(self) -> None:
        self._is_left.set()
        self._inner = None  # its daemon ends with the last reference

    def set(self, key: str, value: Any) -> None:
        self._open().set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._open().get(key)

    def add(self, key: str, amount: int) -> int:
        return self._open().add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._open().check(keys)

    def delete_key(self, key: str) -> bool:
        return self._open().delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout_seconds if timeout is None else min(timeout.total_seconds(), self._timeout_seconds)
        end = time.monotonic() + limit
        while not self._open().check(keys):
            self._is_left.wait(_POLL_SECONDS)
            if time.monotonic() > end:
                raise RuntimeError("a rank did not come")

    def has_extended_api(self) -> bool:
        return False

    def _open(self) -> dist.TCPStore:
        inner = self._inner
        if inner is None:
            raise RuntimeError("it was called off")
        return inner


class UpdateGroup:
    """One group, as rank 0 of it."""

    def __init__(
        self, rendezvous: Rendezvous, *, name: str, world_size: int, backend: str, timeout_seconds: float
    ) -> None:
        """Blocks until all ranks have joined.

        Raises:
            WeightSyncError: they did not in time.
        """
        device = {"gloo": "cpu", "nccl": "cuda"}[backend]
        store: Any = rendezvous.store
        for prefix in (name, f"{name}/", f"{device}/"):
            store = dist.PrefixStore(prefix, store)
        self._rendezvous = rendezvous  # the store lives as long as the group
        self._timeout = timedelta(seconds=timeout_seconds)
        try:
            self._group = self._made(backend, store, world_size, rendezvous.address)
        except RuntimeError as error:  # torch's own errors are children of it
            raise WeightSyncError(
                f"the group of weight updates with {world_size} ranks ({backend}) did not come together within "
                f"{timeout_seconds:g} s ({_line(error)}); check that the servers reach {rendezvous.address}:"
                f"{rendezvous.port}"
            ) from error

    def broadcast(self, flat: Tensor) -> None:
        """Give `flat` to every rank; blocks until it is on its way to all, or the time is over.

        Raises:
            WeightSyncError: a rank is gone or does not take it.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._group.broadcast([flat], options).wait(self._timeout)
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)
        except RuntimeError as error:
            raise WeightSyncError(f"the broadcast of {flat.numel()} bytes broke ({_line(error)})") from error

    def abort(self) -> None:
        """End what another thread of this process waits for in the group, where the backend can; never raises."""
        # where a backend says that it has none; gloo's does nothing: its operations end by their timeout
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        self.leave()

    def leave(self) -> None:
        """Close the store, so that the next group may listen on the same port. What was built works on."""
        self._rendezvous.call_off()

    def _made(self, backend: str, store: Any, world_size: int, address: str) -> Any:
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            with _waiting_in_the_caller():
                return dist.ProcessGroupNCCL(store, 0, world_size, options)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, 0, world_size, options)


@contextlib.contextmanager
def _waiting_in_the_caller() -> Iterator[None]:
    """A group of NCCL that is made inside waits in `wait`, which raises when the time is over, as gloo's does.

    torch reads this when a group is made. Otherwise `wait` returns at once, and torch's watchdog ends the process, with
    the learner in it, once a broadcast takes too long: as it does when a server dies in its midst. (That the failure
    is not told to the learner's groups either is settled in `mcore/gpu.py`.)
    """
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
