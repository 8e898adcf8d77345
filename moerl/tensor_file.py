"""Safetensors files read by offsets and written as a stream, so that memory holds one tensor and never the file.

The library maps files into memory, whose pages then count as the process's own; and it writes a file only from tensors
that are all there. Both directions are plain reads and writes here, and a damaged header is refused.

A file is summed in parts, its header and each tensor, so that whoever reads its tensors one by one, in any order and in
several threads, has its sum without reading it twice; and a tensor that goes from file to file as it is is summed once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import resource
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.manifest import PARTS_SUM

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The format's word -> torch's type."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000
_ALIGNMENT = 8
_SUM_BYTES = 1 << 23
"""Read at a time where a tensor is only summed."""
_MAX_OPEN = 1 << 16
"""Handles that a process allows itself: programs that it starts may count through all that they could have."""
_reading = threading.local()


@dataclass(frozen=True, slots=True)
class Described:
    """One tensor of a file, as its header says."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def sum_of_parts(sums: Iterable[str]) -> str:
    """SHA-256 of the SHA-256 (hex) of a file's parts, one after another: its header, then its tensors as they lie."""
    return hashlib.sha256("".join(sums).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Read:
    """The tensor that a thread read last; it is kept, so that its memory is nobody else's while its sum is known."""

    tensor: Tensor
    version: int
    """Of its values: torch counts up whenever they are changed in place."""
    digest: str


@contextmanager
def summed_reads() -> Iterator[dict[str, dict[str, str]]]:
    """Path -> tensor -> SHA-256, of everything that this thread reads whole from a `TensorFile` meanwhile.

    Raises:
        CheckpointError: inside, where one tensor is read twice and was not the same.
    """
    _reading.sums, _reading.last = {}, None
    try:
        yield _reading.sums
    finally:
        _reading.sums = _reading.last = None


def _sum_of(tensor: Tensor) -> str | None:
    """What is known of a contiguous tensor that is the one that this thread read last, whole and unchanged."""
    last: _Read | None = vars(_reading).get("last")
    if last is None or last.tensor.data_ptr() != tensor.data_ptr() or last.tensor.nbytes != tensor.nbytes:
        return None
    return last.digest if tensor._version == last.version else None


class TensorFile:
    """An open file; reads may come from several threads."""

    def __init__(self, path: Path, *, remedy: str = "download or export it again") -> None:
        """Open it and check its header; `remedy` is what to do about a damaged one.

        Raises:
            CheckpointError: it cannot be opened, is truncated, or its header is damaged.
        """
        self.path = path
        self._remedy = remedy
        self._tensors: dict[str, tuple[Described, int]] = {}
        try:
            self._handle = _opened(path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # says nothing about this file
                raise CheckpointError(
                    f"{path} cannot be opened ({error.strerror}): every file of a checkpoint stays open; allow more "
                    "with ulimit -Hn, or convert the checkpoint into larger files"
                ) from error
            raise self._damaged(error.strerror or str(error)) from error
        try:
            self._read_header()
        except CheckpointError:
            self.close()
            raise

    def names(self) -> list[str]:
        """In the order of their bytes."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def describe(self, name: str) -> Described:
        """Type and shape of a tensor."""
        return self._tensors[name][0]

    def read(self, name: str) -> Tensor:
        """A tensor of its own memory.

        Raises:
            CheckpointError: the file cannot be read.
        """
        described, start = self._tensors[name]
        tensor = self._read(start, described.shape, described.dtype)
        sums: dict[str, dict[str, str]] | None = vars(_reading).get("sums")
        if sums is not None:
            self._note(name, tensor, sums.setdefault(str(self.path), {}))
        return tensor

    def _note(self, name: str, tensor: Tensor, sums: dict[str, str]) -> None:
        digest = hashlib.sha256(_bytes_of(tensor)).hexdigest()
        if sums.setdefault(name, digest) != digest:
            raise self._damaged(f"{name} was another one when it was read before")
        _reading.last = _Read(tensor, tensor._version, digest)

    def sum(self, known: Mapping[str, str] | None = None) -> str:
        """The file's `sum_of_parts`; `known`: tensor -> SHA-256 of those that need not be read.

        Raises:
            CheckpointError: the file cannot be read.
        """
        known = {} if known is None else known
        parts = (known.get(name) or self._sum(*place) for name, place in self._tensors.items())
        return sum_of_parts((self._header_sum, *parts))

    def _sum(self, described: Described, start: int) -> str:
        digest, buffer = hashlib.sha256(), bytearray(min(_SUM_BYTES, described.num_bytes))
        for at in range(0, described.num_bytes, _SUM_BYTES):
            view = memoryview(buffer)[: min(_SUM_BYTES, described.num_bytes - at)]
            self._fill(view, start + at)
            digest.update(view)
        return digest.hexdigest()

    def read_box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Part of a tensor. Up to the first axis of which more than one index is wanted, nothing around it is read.

        Raises:
            CheckpointError: the file cannot be read.
        """
        described, start = self._tensors[name]
        shape = described.shape
        if tuple(size) == shape:
            return self.read(name)
        axis = next((i for i, extent in enumerate(size) if extent != 1), len(shape) - 1)
        first = sum(offset[i] * math.prod(shape[i + 1 :]) for i in range(axis + 1))
        rows = tuple(size[: axis + 1]) + shape[axis + 1 :]
        read = self._read(start + first * described.dtype.itemsize, rows, described.dtype)
        rest = tuple(slice(a, a + b) for a, b in zip(offset[axis + 1 :], size[axis + 1 :], strict=True))
        return read[(slice(None),) * (axis + 1) + rest] if rest else read

    def close(self) -> None:
        """Close it; a second time does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if "_handle" in vars(self):
            self.close()

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated or damaged ({what}); {self._remedy}")

    def _read(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self._fill(_bytes_of(tensor), start)
        return tensor

    def _fill(self, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._handle, [view[done:]], start + done)
            except OSError as error:
                raise self._damaged(error.strerror or str(error)) from error
            if not count:
                raise self._damaged("it ends before its data does")
            done += count

    def _read_header(self) -> None:
        size = os.fstat(self._handle).st_size
        if size < 8:
            raise self._damaged(f"{size} bytes hold no header")
        length = bytearray(8)
        self._fill(memoryview(length), 0)
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > min(size - 8, _MAX_HEADER):
            raise self._damaged(f"its header would have {num_bytes} bytes, the file has {size}")
        text = bytearray(num_bytes)
        self._fill(memoryview(text), 8)
        self._header_sum = hashlib.sha256(length + text).hexdigest()
        try:
            header = json.loads(text)
            self._tensors = self._parse(header, 8 + num_bytes)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(f"its header is not valid: {error}") from error
        end = 8 + num_bytes
        for described, start in self._tensors.values():
            if start != end:
                raise self._damaged(f"{described.name} begins at byte {start}, the tensor before it ends at {end}")
            end += described.num_bytes
        if end != size:
            raise self._damaged(f"its tensors end at byte {end}, the file has {size}")

    def _parse(self, header: dict[str, Any], base: int) -> dict[str, tuple[Described, int]]:
        found = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise self._damaged(f"{name} has the unknown type {entry['dtype']!r}")
            described = Described(name, DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])))
            start, stop = entry["data_offsets"]
            if stop - start != described.num_bytes:
                raise self._damaged(
                    f"{name} takes {described.num_bytes} bytes, its place in the file has {stop - start}"
                )
            found.append((described, base + start))
        return {entry[0].name: entry for entry in sorted(found, key=lambda entry: (entry[1], entry[0].num_bytes))}


def _opened(path: Path) -> int:
    """A handle for reading; where half of those that this process may have are taken, it allows itself more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        handle = -1
    if not 0 <= handle < soft // 2:
        most = _MAX_OPEN if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return os.open(path, os.O_RDONLY) if handle < 0 else handle


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data.cast("B") if tensor.numel() else memoryview(b"")


class TensorFileWriter:
    """A file whose tensors are known by name before the first of them is there; `with` it, and `add` them in order."""

    def __init__(self, path: Path, tensors: Sequence[Described], *, is_lasting: bool = True) -> None:
        """`tensors` in the order in which they come.

        `is_lasting` False: a file that only has to be there while the run lives is neither summed nor flushed.
        """
        self._path = path
        self._expected = list(tensors)
        self._is_lasting = is_lasting
        self._count = 0
        self._sums: list[str] = []

    def __enter__(self) -> Self:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self._expected:
            place = [end, end + tensor.num_bytes]
            header[tensor.name] = {"dtype": _WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
            end += tensor.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._file = self._path.open("wb", buffering=0)
        head = len(text).to_bytes(8, "little") + text
        self._sums = [hashlib.sha256(head).hexdigest()]
        self._write(memoryview(head))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flush to the disk.

        Raises:
            CheckpointError: not every tensor came.
        """
        with self._file:
            if error is None:
                if self._count != len(self._expected):
                    raise CheckpointError(f"{self._path}: {self._expected[self._count].name} never came")
                if self._is_lasting:
                    os.fsync(self._file.fileno())

    def add(self, tensor: Tensor) -> None:
        """The next tensor.

        Raises:
            CheckpointError: it is not the one that was announced.
        """
        expected = self._expected[self._count]
        if (tensor.dtype, tuple(tensor.shape)) != (expected.dtype, expected.shape):
            raise CheckpointError(
                f"{expected.name} came as {tensor.dtype} {list(tensor.shape)}, announced were {expected.dtype} "
                f"{list(expected.shape)}"
            )
        self._count += 1
        tensor = tensor.contiguous()
        data = _bytes_of(tensor)
        if self._is_lasting:
            self._sums.append(_sum_of(tensor) or hashlib.sha256(data).hexdigest())
        self._write(data)

    def sum(self) -> dict[str, Any]:
        """Size and `PARTS_SUM` of what was written, if it is lasting: a manifest's entry."""
        return {"bytes": self._path.stat().st_size, PARTS_SUM: sum_of_parts(self._sums)}

    def _write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._file.write(data[done:]) or 0
