"""A stand-in for a server's weights that really takes them: it opens shared memory, joins groups, reads folders."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.checksums import checksum
from moerl.errors import WeightSyncError
from moerl.tensor_file import TensorFile

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)}


@dataclass
class Info:
    tensor_size: int


@dataclass
class Sums:
    engine: str
    ranks: list[dict[str, str]]


class WeightServerStandIn:
    """Keeps `WeightServer`. Weights change tensor by tensor, as the real one's do, so that mixtures can be seen."""

    def __init__(self, tensor_size: int = 1, *, url: str = "http://stand-in", group_seconds: float = 30.0) -> None:
        self.url = url
        self.tensor_size = tensor_size
        self.group_seconds = group_seconds
        self.weights: dict[str, Tensor] = {}
        self.label = "start"
        self.labels_seen: list[str | None] = []
        self.in_session = False
        self.calls: list[str] = []
        self.faults: dict[str, int] = {}
        """Endpoint -> which call of it fails, from 0."""
        self.damages = False
        """Change one byte of what comes into memory."""
        self.dies_in_broadcast = False
        self.groups: dict[str, list[dist.ProcessGroupGloo]] = {}
        self._counts: Counter[str] = Counter()

    def note(self, call: str) -> None:
        self.calls.append(call)
        number = self._counts[call]
        self._counts[call] += 1
        if self.faults.get(call) == number:
            raise WeightSyncError(f"{self.url} refused {call}")

    async def server_info(self) -> Info:
        self.note("info")
        return Info(self.tensor_size)

    async def checksum(self) -> Sums:
        self.note("checksum")
        sums = {name: checksum([(name, tensor)]) for name, tensor in self.weights.items()}
        return Sums(checksum(sorted(self.weights.items())), [sums] * self.tensor_size)

    async def begin_update(self) -> None:
        self.note("begin")
        if self.in_session:
            raise WeightSyncError("a session is open")
        self.in_session = True

    async def end_update(self) -> None:
        self.note("end")
        if not self.in_session:
            raise WeightSyncError("no session is open")
        self.in_session = False

    async def update_from_disk(self, model_path: str, *, weight_version, flush_cache, keep_pause) -> None:
        self.note("disk")
        assert not flush_cache
        assert keep_pause
        assert (Path(model_path) / "config.json").is_file()
        for path in sorted(Path(model_path).glob("*.safetensors")):
            with TensorFile(path) as file:
                self.weights |= {name: file.read(name) for name in file.names()}
        self._relabel(weight_version)

    async def update_from_tensor(self, serialized, *, load_format, weight_version) -> None:
        self.note("tensor")
        assert load_format == "flattened_bucket"
        assert len(serialized) == self.tensor_size
        assert self.in_session
        for text in serialized:
            content = pickle.loads(base64.b64decode(text, validate=True))
            flat = content["flattened_tensor"]
            for meta in content["metadata"]:
                assert meta.end_idx - meta.start_idx == meta.numel
                self._take(meta.name, flat[meta.start_idx : meta.end_idx], meta.dtype, meta.shape)
        self._relabel(weight_version)

    async def init_group(self, *, master_address, master_port, rank_offset, world_size, group_name, backend) -> None:
        self.note("init")
        assert backend == "gloo"

        def join(rank: int) -> dist.ProcessGroupGloo:
            limit = timedelta(seconds=self.group_seconds)
            store = dist.TCPStore(master_address, master_port, world_size, False, limit)
            for prefix in (group_name, f"{group_name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            return dist.ProcessGroupGloo(store, rank_offset + rank, world_size, limit)

        ranks = [asyncio.to_thread(join, rank) for rank in range(self.tensor_size)]
        try:
            self.groups[group_name] = list(await asyncio.gather(*ranks))
        except RuntimeError as error:
            raise WeightSyncError(f"Failed to initialize custom process group: {error}") from error

    async def update_from_distributed(self, named, *, group_name, load_format, weight_version) -> None:
        self.note("distributed")
        assert load_format == "flattened_bucket"
        assert self.in_session
        if self.dies_in_broadcast:
            self.groups.clear()
            raise _lost(self.url)
        num_bytes = 0
        places = []
        for name, dtype, shape in named:
            size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
            assert num_bytes % DTYPES[dtype].itemsize == 0, "the real server refuses unaligned tensors"
            places.append((name, num_bytes, num_bytes + size, DTYPES[dtype], shape))
            num_bytes += size
        for flat in await asyncio.gather(
            *(asyncio.to_thread(_received, group, num_bytes) for group in self.groups[group_name])
        ):
            for name, start, stop, dtype, shape in places:
                self._take(name, flat[start:stop], dtype, shape)
        self._relabel(weight_version)

    async def destroy_group(self, group_name: str) -> None:
        self.note("destroy")
        if self.groups.pop(group_name, None) is None:
            raise WeightSyncError("no such group")

    def holds(self, weights: dict[str, Tensor]) -> bool:
        return checksum(sorted(self.weights.items())) == checksum(sorted(weights.items()))

    def _take(self, name: str, data: Tensor, dtype: torch.dtype, shape) -> None:
        data = data.clone()
        if self.damages and data.numel():
            data[0] ^= 1
        self.weights[name] = data.view(dtype).reshape(shape)

    def _relabel(self, version: int | None) -> None:
        self.labels_seen.append(None if version is None else str(version))
        if version is not None:
            self.label = str(version)


def _received(group: dist.ProcessGroupGloo, num_bytes: int) -> Tensor:
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    try:
        group.broadcast([flat], options).wait()
    except RuntimeError as error:
        raise WeightSyncError(f"Failed to receive weights: {error}") from error
    return flat


def _lost(url: str) -> WeightSyncError:
    from moerl.rollout.sglang.faults import ServerError

    fault = ServerError("lost", url, "/update_weights_from_distributed", "no whole answer", "see its log")
    error = WeightSyncError(str(fault))
    error.__cause__ = fault
    return error
