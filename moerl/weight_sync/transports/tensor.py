"""Into servers on the trainer's own machine: they open the packed bucket's memory and copy out of it.

On a GPU the memory travels as a CUDA IPC handle, on the CPU as the name of a shared file (a descriptor, torch's
default, would need the two processes to be related; it ends SGLang). What is pickled is made here, and nothing is ever
unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing as shared
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.weight_sync.flat import FlatEntry
from moerl.weight_sync.live import LiveSender, default_device
from moerl.weight_sync.servers import Failures, SenderPlace, WeightServer, is_here, on_each
from moerl.weight_sync.transport import HandOver, transports
from moerl.weight_sync.transports.disk import check_interval

_STRATEGY = threading.Lock()
"""torch's sharing strategy belongs to the process; it is another one only while a tensor is pickled."""


@dataclass(frozen=True)
class TensorConfig:
    """Arguments of `weight_sync.transport: {name: tensor}`."""

    check_every: int = 100
    """The first update and every so many-th is compared with a load of the same version from the disk; 0: none."""
    keep_copy: bool = False
    """Write every version to the disk too, so that a server that was started anew need not wait for the next update."""

    def __post_init__(self) -> None:
        check_interval(self.check_every)


class TensorSender(LiveSender):
    """Sends to servers that see this process's memory."""

    def __init__(self, cfg: TensorConfig, place: SenderPlace) -> None:
        """Nothing is allocated yet."""
        super().__init__(place, check_every=cfg.check_every, keep_copy=cfg.keep_copy)
        self._sizes: dict[WeightServer, int] = {}

    def _allocate(self, num_bytes: int) -> Tensor:
        device = default_device()
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    async def _deliver(
        self, entries: Sequence[FlatEntry], flat: Tensor, servers: Sequence[WeightServer], label: int | None
    ) -> Failures:
        for server in servers:
            if server not in self._sizes and not await asyncio.to_thread(is_here, server.url):
                raise WeightSyncError(
                    f"{server.url} is on another machine, which cannot open this one's memory: set "
                    "weight_sync.transport=distributed or disk"
                )
        if flat.is_cuda:
            await asyncio.to_thread(torch.cuda.synchronize, flat.device)

        async def post(server: WeightServer) -> None:
            if server not in self._sizes:
                self._sizes[server] = (await server.server_info()).tensor_size
            parts = [serialised(entries, flat) for _ in range(self._sizes[server])]  # each is opened once
            await server.update_from_tensor(parts, load_format="flattened_bucket", weight_version=label)

        return (await on_each(servers, post))[1]


def serialised(entries: Sequence[FlatEntry], flat: Tensor) -> str:
    """base64 of what one rank reads: where the memory is, and what lies in it."""
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=entry.dtype,
            start_idx=entry.start,
            end_idx=entry.stop,
            numel=entry.stop - entry.start,
        )
        for entry in entries
    ]
    out = io.BytesIO()
    with _STRATEGY:
        before = shared.get_sharing_strategy()
        shared.set_sharing_strategy("file_system")
        try:
            ForkingPickler(out).dump({"flattened_tensor": flat, "metadata": metadata})
        finally:
            shared.set_sharing_strategy(before)
    return base64.b64encode(out.getbuffer()).decode("ascii")


@transports.register("tensor", TensorConfig, sender=TensorSender)
class TensorTransport(HandOver):
    """The engines' senders do it."""
