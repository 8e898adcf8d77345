"""Time and memory of publishing weights through each transport, against a plain copy of the same bytes in the same run.

    python tools/bench/publish.py [--gigabytes 1] [--bucket-megabytes 256] [--transports disk tensor distributed]

The receiver is a process of its own that takes what a server takes (it opens the shared memory, joins the gloo group,
maps the files), once as it is and once with the copy into weights of its own that any server makes. What SGLang does
with a weight is not in it. Every figure is the best of `--rounds`; the memory is this process's peak above its weights.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moerl.weight_sync.buckets import make_buckets
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender
from moerl.weight_sync.transports.distributed import DistributedConfig, DistributedSender
from moerl.weight_sync.transports.tensor import TensorConfig, TensorSender

_MEGABYTE = 1 << 20


def receive(connection: Any, num_bytes: int) -> None:
    """The other process: take orders until None comes."""
    torch.set_num_threads(1)
    own = torch.zeros(num_bytes, dtype=torch.uint8)
    group: Any = None
    place = 0
    while (order := connection.recv()) is not None:
        kind, arguments, copies = order
        if kind == "begin":
            place = 0
        elif kind == "join":
            group = _join(**arguments)
        else:
            taken = _take(kind, arguments, group)
            for part in taken if copies else ():
                flat = part.reshape(-1).view(torch.uint8)
                own[place : place + flat.numel()].copy_(flat)
                place += flat.numel()
            del taken
        connection.send("done")


def _join(address: str, port: int, world: int, name: str) -> Any:
    import torch.distributed as dist

    store: Any = dist.TCPStore(address, port, world, False, timedelta(seconds=60))
    for prefix in (name, f"{name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, 1, world, timedelta(seconds=60))


def _take(kind: str, arguments: Any, group: Any) -> list[torch.Tensor]:
    import torch.distributed as dist
    from safetensors import safe_open

    if kind == "tensor":
        return [pickle.loads(base64.b64decode(arguments))["flattened_tensor"]]
    if kind == "distributed":
        flat = torch.empty(arguments, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([flat], options).wait()
        return [flat]
    taken = []
    for path in sorted(Path(arguments).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            taken += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  it is no dictionary
    return taken


class Receiver:
    """Keeps `WeightServer` over a pipe."""

    url = "the receiver"

    def __init__(self, num_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(theirs, num_bytes), daemon=True)
        self._process.start()
        self.copies = False

    async def ask(self, kind: str, arguments: Any = None) -> None:
        self._pipe.send((kind, arguments, self.copies))
        await asyncio.to_thread(self._pipe.recv)

    async def server_info(self) -> Any:
        return SimpleNamespace(tensor_size=1)

    async def begin_update(self) -> None:
        await self.ask("begin")

    async def end_update(self) -> None:
        return

    async def destroy_group(self, group_name: str) -> None:
        return

    async def update_from_disk(self, model_path: str, **_: Any) -> None:
        await self.ask("begin")
        await self.ask("disk", model_path)

    async def update_from_tensor(self, serialized: Any, **_: Any) -> None:
        await self.ask("tensor", serialized[0])

    async def init_group(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, **_: Any
    ) -> None:
        arguments = {"address": master_address, "port": master_port, "world": world_size, "name": group_name}
        await self.ask("join", arguments)

    async def update_from_distributed(self, named: Any, **_: Any) -> None:
        sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in named]
        await self.ask("distributed", sum(sizes))

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)


def peak_bytes(*, reset: bool = False) -> int:
    """Largest resident memory of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def best(rounds: int, action: Any) -> float:
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def baselines(weights: dict[str, torch.Tensor], folder: Path, rounds: int) -> tuple[float, float]:
    """(copy in memory, copy of a file) in seconds; neither is flushed to the disk."""
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    memory = best(
        rounds, lambda: [mine.copy_(tensor) for mine, tensor in zip(target.values(), weights.values(), strict=True)]
    )
    target.clear()
    source = folder / "source"
    with source.open("wb") as file:
        for tensor in weights.values():
            file.write(tensor.view(torch.uint8).numpy().data)
    disk = best(rounds, lambda: shutil.copyfile(source, folder / "copy"))
    source.unlink()
    (folder / "copy").unlink()
    return memory, disk


def make(kind: str, place: SenderPlace) -> Any:
    """The sender of a transport, without checks."""
    if kind == "disk":
        return DiskSender(DiskConfig(check_every=0), place)
    if kind == "tensor":
        return TensorSender(TensorConfig(check_every=0), place)
    return DistributedSender(DistributedConfig(backend="gloo", check_every=0), place)


async def publish(sender: Any, receiver: Receiver, weights: Any, version: int, bucket_bytes: int) -> None:
    """One update."""
    buckets = make_buckets(weights.items(), version=version, bucket_bytes=bucket_bytes, is_summed=False)
    for bucket in buckets:
        failed = await sender.send(bucket, [receiver])
        if failed:
            raise next(iter(failed.values()))
    failed = await sender.commit(version, [receiver])
    if failed:
        raise next(iter(failed.values()))


async def measure(kind: str, weights: Any, receiver: Receiver, arguments: argparse.Namespace, folder: Path) -> Any:
    """Seconds until delivered, seconds until copied by the receiver, peak bytes above the weights."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    sender = make(kind, SenderPlace(folder / "weights", model))
    bucket_bytes = arguments.bucket_megabytes * _MEGABYTE
    seconds: dict[bool, float] = {}
    version = 0
    before = peak_bytes(reset=True)
    for copies in (False, True):
        receiver.copies = copies
        rounds = []
        for _ in range(arguments.rounds + 1):  # the first builds groups and touches memory
            version += 1
            started = time.perf_counter()
            await publish(sender, receiver, weights, version, bucket_bytes)
            rounds.append(time.perf_counter() - started)
        seconds[copies] = min(rounds[1:])
    peak = peak_bytes() - before
    sender.close()
    return seconds[False], seconds[True], peak


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of weights, GiB (default %(default)s)")
    parser.add_argument("--bucket-megabytes", type=int, default=256, help="MiB of a bucket (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the best counts (default %(default)s)")
    parser.add_argument("--transports", nargs="+", default=["disk", "tensor", "distributed"], help="default: all")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is to be measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count = max(1, round(arguments.gigabytes * 1024 / 64))
    weights = {f"w{i:03d}": torch.full((32, _MEGABYTE), i, dtype=torch.bfloat16) for i in range(count)}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        memory, disk = baselines(weights, folder, arguments.rounds)
        print(f"{num_bytes / 2**30:.2f} GiB, buckets of {arguments.bucket_megabytes} MiB, {os.cpu_count()} cores")
        print(f"copy in memory {memory:.3f} s; copy of a file {disk:.3f} s")
        receiver = Receiver(num_bytes)
        for kind in arguments.transports:
            base = disk if kind == "disk" else memory
            taken, copied, peak = asyncio.run(measure(kind, weights, receiver, arguments, folder))
            buckets = peak / (arguments.bucket_megabytes * _MEGABYTE)
            print(
                f"{kind:12} delivered {taken:.3f} s = {taken / base:.2f} x; with the receiver's copy {copied:.3f} s = "
                f"{copied / base:.2f} x; peak {buckets:.2f} buckets"
            )
        receiver.close()


if __name__ == "__main__":
    main()
