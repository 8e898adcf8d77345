"""Files of sharded tensors: every rank writes the boxes that it holds, any rank reads any box; no pickle.

Each rank writes `rank_00000.safetensors` (its boxes) and `rank_00000.json` (of which whole tensors they are boxes, and
what is not a tensor). Whole tensors are known by name, shape and dtype; who wrote which box does not matter to a
reader, so it may be laid out in any other way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.tensor_file import TensorFile

FORMAT = 2

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}
"""What a reader knows; nothing else may be written."""

Box = tuple[int, ...]
"""Offsets, or sizes, along every axis of a whole tensor."""


@dataclass(frozen=True)
class Shard:
    """One box of a whole tensor."""

    name: str
    shape: Box
    """Of the whole tensor."""
    offset: Box
    data: Tensor
    """With as many axes as `shape`."""

    @property
    def key(self) -> str:
        """Its name in the file of the rank that writes it."""
        return f"{self.name}@{','.join(map(str, self.offset))}"


@dataclass(frozen=True)
class Part:
    """One box as it lies on disk."""

    rank: int
    offset: Box
    size: Box
    key: str


@dataclass
class Entry:
    """One whole tensor as it lies on disk."""

    shape: Box
    dtype: torch.dtype
    parts: list[Part] = field(default_factory=list)
    _by_first: dict[int, list[Part]] | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize

    def touching(self, offset: Box, size: Box) -> Iterator[tuple[Part, Box, Box]]:
        """(part, offset, size) of every intersection of the box with a part."""
        for part in self._near(offset, size):
            start = tuple(map(max, offset, part.offset))
            stop = tuple(min(a + b, c + d) for a, b, c, d in zip(offset, size, part.offset, part.size, strict=True))
            extent = tuple(b - a for a, b in zip(start, stop, strict=True))
            if min(extent, default=1) > 0:
                yield part, start, extent

    def _near(self, offset: Box, size: Box) -> Sequence[Part]:
        """Experts are parts of one tensor, one slice each: looked up, since searching them would be quadratic."""
        if self._by_first is None:
            self._by_first = {}
            if self.shape and all(part.size[0] == 1 for part in self.parts):
                for part in self.parts:
                    self._by_first.setdefault(part.offset[0], []).append(part)
        if self._by_first and size[0] == 1:
            return self._by_first.get(offset[0], ())
        return self.parts


def files_of(folder: Path, rank: int) -> tuple[Path, Path]:
    """Tensors and description of one rank."""
    return folder / f"rank_{rank:05d}.safetensors", folder / f"rank_{rank:05d}.json"


def has_shards(folder: Path) -> bool:
    """Whether `folder` holds what `write_rank` wrote."""
    return files_of(folder, 0)[1].is_file()


def write_rank(
    folder: Path, rank: int, shards: Sequence[Shard], state: Mapping[str, Any], extra: Mapping[str, Tensor]
) -> None:
    """Write one rank's boxes and its `state` (plain JSON); `extra` tensors are this rank's alone.

    Every tensor must own its memory; the boxes of all ranks together must cover every whole tensor once.
    """
    tensors: dict[str, Any] = {}
    for shard in shards:
        dtype = str(shard.data.dtype).removeprefix("torch.")
        described = tensors.setdefault(shard.name, {"shape": list(shard.shape), "dtype": dtype, "parts": []})
        described["parts"].append([list(shard.offset), list(shard.data.shape)])
    tensor_file, json_file = files_of(folder, rank)
    save_file({**{shard.key: shard.data for shard in shards}, **extra}, tensor_file)
    json_file.write_text(json.dumps({"format": FORMAT, **state, "tensors": tensors}))


class ShardReader:
    """Reads boxes of whole tensors from the files of all ranks; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Read the descriptions of all ranks.

        Raises:
            CheckpointError: a missing or damaged file, or another format.
        """
        self.folder = folder
        first = read_rank(folder, 0)
        self.ranks = [first, *(read_rank(folder, rank) for rank in range(1, int(first["world_size"])))]
        """What each rank described, without its tensors."""
        self.entries: dict[str, Entry] = {}
        """By name."""
        for rank, described in enumerate(self.ranks):
            for name, tensor in described.pop("tensors").items():
                shape, dtype = tuple(tensor["shape"]), DTYPES.get(tensor["dtype"])
                if dtype is None:
                    raise CheckpointError(f"{folder}: {name} has the unknown dtype {tensor['dtype']!r}; it is damaged")
                entry = self.entries.setdefault(name, Entry(shape, dtype))
                if (entry.shape, entry.dtype) != (shape, dtype):
                    raise CheckpointError(
                        f"{folder}: ranks disagree on {name} ({entry.dtype} {list(entry.shape)}, rank {rank} says "
                        f"{dtype} {list(shape)}); the checkpoint is damaged"
                    )
                for offset, size in tensor["parts"]:
                    key = f"{name}@{','.join(map(str, offset))}"
                    entry.parts.append(Part(rank, tuple(offset), tuple(size), key))
        self._handles: dict[int, TensorFile] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def check(self, targets: Sequence[Shard]) -> None:
        """Whether every target can be filled.

        Raises:
            CheckpointError: a name that is not there, another shape or dtype, a box that the files do not cover, a
                file that cannot be opened, or one that holds a part otherwise than its description says.
        """
        for target in targets:
            entry = self.entries.get(target.name)
            if entry is None:
                raise CheckpointError(
                    f"{self.folder} holds no {target.name}, which this run needs; check model.path, model.freeze and "
                    "optim.name"
                )
            if entry.shape != target.shape or entry.dtype != target.data.dtype:
                raise CheckpointError(
                    f"{self.folder} belongs to another model: {target.name} is {entry.dtype} {list(entry.shape)}, this "
                    f"one has {target.data.dtype} {list(target.shape)}; check model.path and precision.params"
                )
            covered = 0
            for part, _, size in entry.touching(target.offset, tuple(target.data.shape)):
                covered += math.prod(size)
                self._file(part, entry.dtype)
            if covered != target.data.numel():
                raise CheckpointError(
                    f"{self.folder}: the files hold {covered} of the {target.data.numel()} elements of {target.name} "
                    f"at {list(target.offset)}; the checkpoint is damaged"
                )

    @torch.no_grad()
    def fill(self, target: Shard) -> None:
        """Copy the box of `target` into its data.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        entry = self.entries[target.name]
        for part, start, size in entry.touching(target.offset, tuple(target.data.shape)):
            inside = [a - b for a, b in zip(start, part.offset, strict=True)]
            source = self._file(part, entry.dtype).read_box(part.key, inside, size)
            place = tuple(slice(a - b, a - b + c) for a, b, c in zip(start, target.offset, size, strict=True))
            target.data[place].copy_(source)

    def read(self, name: str, offset: Box, size: Box) -> Tensor:
        """A box of a whole tensor, in memory of its own; without a copy where one part of the files holds all of it.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        entry = self.entries[name]
        touching = list(entry.touching(offset, size))
        if len(touching) == 1 and touching[0][2] == size:
            part, start, _ = touching[0]
            inside = [a - b for a, b in zip(start, part.offset, strict=True)]
            return self._file(part, entry.dtype).read_box(part.key, inside, size)
        target = torch.empty(size, dtype=entry.dtype)
        self.fill(Shard(name, entry.shape, offset, target))
        return target

    def extra(self, rank: int) -> dict[str, Tensor]:
        """Tensors of `rank` that are boxes of nothing.

        Raises:
            CheckpointError: as `fill`.
        """
        file = self._open(rank)
        return {key: file.read(key) for key in file.names() if "@" not in key}

    def _file(self, part: Part, dtype: torch.dtype) -> TensorFile:
        """The file of a part, once it holds it as the description beside it says."""
        file = self._open(part.rank)
        found = file.describe(part.key) if part.key in file else None
        if found is None or (found.dtype, found.shape) != (dtype, part.size):
            has = "lacks it" if found is None else f"has {found.dtype} {list(found.shape)}"
            raise CheckpointError(
                f"{file.path} is damaged: {part.key} is to be {dtype} {list(part.size)}, and it {has}; use an earlier "
                "checkpoint"
            )
        return file

    def _open(self, rank: int) -> TensorFile:
        path = files_of(self.folder, rank)[0]
        if rank not in self._handles:
            if not path.is_file():
                raise CheckpointError(f"{path} does not exist; the checkpoint lacks the part of a rank")
            self._handles[rank] = TensorFile(path, remedy="use an earlier checkpoint")
        return self._handles[rank]


def read_rank(folder: Path, rank: int) -> dict[str, Any]:
    """What `write_rank` was given for `rank`, with the description of its boxes under `tensors`.

    Raises:
        CheckpointError: missing, damaged, or of another format.
    """
    path = files_of(folder, rank)[1]
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; the checkpoint lacks the part of a rank") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use an earlier checkpoint") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(
            f"{path}: format is {found!r}, this version reads {FORMAT} (format 1 was bound to its layout); "
            "use the version that wrote it"
        )
    return state
