"""A folder that is built file by file: by threads and processes, resumed where a kill left it, and there all at once.

`OUT` grows as `.OUT.converting/folder`; a file that is whole has a note beside it with its size and checksum. Processes
share nothing but this folder: file i is made by process i modulo their number, and the first one finishes it. The
others write nothing before the first one, which holds the lock, has named their launch: those of a second one never do,
nor do those of a first one that was killed (`moerl.convert.claims`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moerl.convert.claims import Claim, text_of, wait_for, write_whole
from moerl.errors import CheckpointError, ConfigError
from moerl.manifest import DAMAGED, PARTS_SUM, check_sum, sync
from moerl.models.hf_export import leftovers, put_in_place
from moerl.tensor_file import Described, TensorFile, TensorFileWriter, summed_reads
from moerl.world import World

logger = logging.getLogger(__name__)

PLAN = "plan.json"
SPARE_BYTES = 64 * 2**20
"""Left free on the disk beyond what is written."""
DESPITE = "use another copy, or --skip-checksums to read it all the same"
"""What to do about a damaged source."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of the folder, before it is there."""

    name: str
    tensors: tuple[Described, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def planned_files(
    tensors: Sequence[Described],
    max_bytes: int,
    name: Callable[[int], str],
    *,
    followers: frozenset[str] = frozenset(),
) -> tuple[list[PlannedFile], list[range]]:
    """Cut `tensors` into files of at most `max_bytes` (a larger tensor has one of its own); and which went where.

    `followers` are names of tensors that stand in the file of the one before them.
    """
    starts, held = [0], 0
    sizes = [tensor.num_bytes for tensor in tensors]
    for i in reversed(range(1, len(tensors))):  # the first of several that stay together has the size of all
        if tensors[i].name in followers:
            sizes[i - 1] += sizes[i]
            sizes[i] = 0
    for i, size in enumerate(sizes):
        if held and held + size > max_bytes and tensors[i].name not in followers:
            starts.append(i)
            held = 0
        held += size
    spans = [range(a, b) for a, b in zip(starts, [*starts[1:], len(tensors)], strict=True)]
    return [PlannedFile(name(i), tuple(tensors[j] for j in span)) for i, span in enumerate(spans)], spans


class Show(Protocol):
    """Where progress goes."""

    def begin(self, total: int, done: int) -> None:
        """`total` bytes, of which `done` are there already."""
        ...

    def advance(self, count: int) -> None:
        """`count` more bytes."""
        ...


@dataclass(frozen=True)
class Built:
    """What came of it."""

    sums: Mapping[str, Mapping[str, Any]]
    """File -> size and SHA-256."""
    not_finite: Mapping[str, int]
    """Tensor -> values that are infinite or not a number."""
    num_bytes: int
    num_resumed: int
    """Files that an earlier start had made."""
    seconds: float
    warnings: tuple[str, ...] = ()
    """What else is to be told."""


class Building:
    """One target folder under construction."""

    def __init__(
        self,
        out: Path,
        files: Sequence[PlannedFile],
        identity: Mapping[str, Any],
        *,
        world: World = World(),  # noqa: B008  frozen
        overwrite: bool = False,
        held: Mapping[Path, Mapping[str, Any]] | None = None,
    ) -> None:
        """`identity` (JSON) says what is built from what; another one does not go on from what lies there.

        `held`: files of tensors that are read -> their entries in a manifest, which they are held against on the way.
        """
        self.out = Path(os.path.normpath(out.absolute()))
        self._files = list(files)
        plan = hashlib.sha256(repr([(file.name, file.tensors) for file in files]).encode()).hexdigest()
        self._plan = json.dumps({**identity, "plan": plan, "is_held": bool(held)}, sort_keys=True)
        self._held = {} if held is None else dict(held)
        self._world = world
        self._overwrite = overwrite
        self._root = self.out.with_name(f".{self.out.name}.converting")
        self._folder = self._root / "folder"
        self._is_stopped = threading.Event()
        self._claim = Claim(self._root, self.out, world)

    def build(
        self,
        make: Callable[[int], Iterator[Tensor]],
        finish: Callable[[Path, Built], None],
        *,
        threads: int = 1,
        show: Show | None = None,
    ) -> Built | None:
        """Make every file that is not there yet, then `finish` the folder and put it in place.

        Args:
            make: the tensors of file i, in order.
            finish: writes what else belongs into the folder; called in the first process, once all files are whole.
            threads: files that are made at a time.
            show: the first process's progress.

        Returns:
            What was built; None in other processes than the first.

        Raises:
            ConfigError: the target exists, or another conversion is at work on it.
            CheckpointError: the disk is full or refuses, or a file that was read is not what its manifest says.
        """
        started = time.monotonic()
        try:
            with self._claimed():
                self._prepare()
                resumed = sum(self._note(i) is not None for i in range(len(self._files)))
                self._make_own(make, threads, show)
                if self._world.rank:
                    self._claim.mark()
                    return None
                built = self._gathered(resumed, started, threads)
                self._remove_strays()
                finish(self._folder, built)
                for path in self._folder.iterdir():
                    sync(path)
                sync(self._folder)
                self._refuse_target()  # it may have come in the meantime
                self._claim.refuse_if_lost()
                put_in_place(self._folder, self.out)
                self._remove_set_aside()
                shutil.rmtree(self._root, ignore_errors=True)
        except OSError as error:
            remedy = "Free space or choose another folder"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "Allow more open files (ulimit -n), or take fewer --threads"
            raise CheckpointError(
                f"cannot write {self.out} ({error.strerror or error}); {self.out} is as it was. {remedy}; the same "
                "command then goes on with the files that are whole"
            ) from error
        return built

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Only one conversion at a time into one target; of several processes the first one holds the claim."""
        if self._world.rank:
            yield
            return
        self._refuse_target()
        with self._claim.locked():
            self._remove_set_aside()
            try:
                yield
            finally:
                self._claim.end()  # what it touches is to be removed
                is_of_use = any((self._root / "notes").glob("*.json"))  # to a later start
                if not is_of_use and not self._claim.is_lost:
                    shutil.rmtree(self._root, ignore_errors=True)

    def _refuse_target(self) -> None:
        if os.path.lexists(self.out) and not self._overwrite:
            raise ConfigError(f"{self.out} exists and is left as it is; choose another target, or give --overwrite")

    def _prepare(self) -> None:
        path = self._root / PLAN
        if self._world.rank:
            self._claim.await_first(lambda: text_of(path) == self._plan)
            return
        if text_of(path) != self._plan:
            path.unlink(missing_ok=True)
            for folder in (self._folder, self._root / "notes"):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            self._refuse_small_disk()
            write_whole(path, self._plan)
        else:
            self._folder.mkdir(exist_ok=True)  # a process that was killed may have put it in place already
            for half in self._folder.glob(".*.part"):
                half.unlink()
            for i in (i for i in range(len(self._files)) if self._note(i) is None):
                (self._root / "notes" / f"{i}.json").unlink(missing_ok=True)
            self._refuse_small_disk()
        self._claim.announce()

    def _refuse_small_disk(self) -> None:
        needed = sum(file.num_bytes for i, file in enumerate(self._files) if self._note(i) is None) + SPARE_BYTES
        free = shutil.disk_usage(self._root).free
        if needed > free:
            raise CheckpointError(
                f"{self.out} needs {needed / 1e9:.2f} GB more, and its disk has {free / 1e9:.2f} GB free; free some, "
                "choose another disk or a smaller --dtype"
            )

    def _remove_set_aside(self) -> None:
        """Older targets that a process was killed over; while there is no target, they are all that is left of it."""
        for path, _ in list(leftovers(self.out, "old")) if os.path.lexists(self.out) else ():
            _remove(path)

    def _remove_strays(self) -> None:
        """What an earlier `finish` wrote would be taken for part of the folder by the next one."""
        planned = {file.name for file in self._files}
        for path in list(self._folder.iterdir()):
            if path.name not in planned:
                _remove(path)

    def _make_own(self, make: Callable[[int], Iterator[Tensor]], threads: int, show: Show | None) -> None:
        world = self._world
        mine = [i for i in range(len(self._files)) if i % world.size == world.rank and self._note(i) is None]
        if show is not None:
            total = sum(file.num_bytes for file in self._files)
            show.begin(total, total - sum(f.num_bytes for i, f in enumerate(self._files) if self._note(i) is None))
        with ThreadPoolExecutor(max_workers=threads) as pool:
            futures = [pool.submit(self._make, i, make, show) for i in mine]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:  # of a failure or Ctrl-C; otherwise there is nothing to stop
                self._is_stopped.set()
                pool.shutdown(cancel_futures=True)

    def _make(self, number: int, make: Callable[[int], Iterator[Tensor]], show: Show | None) -> None:
        file, not_finite = self._files[number], {}
        part = self._folder / f".{file.name}.{self._world.rank}-{os.getpid()}.part"
        writer = TensorFileWriter(part, file.tensors)
        with writer, summed_reads() if self._held else nullcontext({}) as read:
            for described, tensor in zip(file.tensors, make(number), strict=True):
                if self._is_stopped.is_set():
                    raise CheckpointError(f"{self.out}: stopped, since another file could not be made")
                bad = num_not_finite(tensor)
                if bad:
                    not_finite[described.name] = bad
                writer.add(tensor)
                if show is not None:
                    show.advance(described.num_bytes)
        self._claim.refuse_if_lost()
        note = {**writer.sum(), "not_finite": not_finite, "read": read}
        part.rename(self._folder / file.name)
        write_whole(self._root / "notes" / f"{number}.json", json.dumps(note))

    def _note(self, number: int) -> dict[str, Any] | None:
        """What is known of a file that is whole; None where it is not."""
        try:
            note = json.loads((self._root / "notes" / f"{number}.json").read_text())
            is_whole = (self._folder / self._files[number].name).stat().st_size == note["bytes"]
        except (OSError, ValueError, KeyError):
            return None
        return note if is_whole else None

    def _gathered(self, resumed: int, started: float, threads: int) -> Built:
        """Wait for the other processes' files, and hold what was read for all of them against its sums."""
        notes: dict[int, dict[str, Any]] = {}

        def missing() -> int:
            for i in set(range(len(self._files))) - notes.keys():
                note = self._note(i)
                if note is not None:
                    notes[i] = note
            return len(self._files) - len(notes)

        self._claim.await_others()
        while left := missing():
            wait_for(lambda before=left: missing() < before, f"other processes to write files of {self.out}")
        self._claim.end()
        self._hold([notes[i]["read"] for i in sorted(notes)], threads)
        sums = {self._files[i].name: {key: notes[i][key] for key in ("bytes", PARTS_SUM)} for i in sorted(notes)}
        broken = {name: count for i in sorted(notes) for name, count in notes[i]["not_finite"].items()}
        total = sum(file.num_bytes for file in self._files)
        return Built(sums, broken, total, resumed, time.monotonic() - started)

    def _hold(self, reads: Sequence[Mapping[str, Mapping[str, str]]], threads: int) -> None:
        """What no file was made of, or only parts were, is read now."""

        def judge(path: Path) -> str | None:
            known: dict[str, str] = {}
            for sums in (read.get(str(path), {}) for read in reads):
                if any(known.setdefault(name, digest) != digest for name, digest in sums.items()):
                    return f"{path} {DAMAGED}"
            try:
                with TensorFile(path) as file:
                    check_sum(path, self._held[path], file.sum(known))
            except CheckpointError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(max_workers=threads) as pool:
            damage = [told for told in pool.map(judge, self._held) if told is not None]
        if damage:
            shutil.rmtree(self._root, ignore_errors=True)  # it was made of what is not to be trusted
            raise CheckpointError(f"{damage[0]}; {DESPITE}")


def _remove(path: Path) -> None:
    """A folder with what is in it; of a link the link itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def num_not_finite(tensor: Tensor) -> int:
    """Values that are infinite or not a number; a sum, which never hides one, is all that a good tensor costs."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or not tensor.numel():
        return 0
    return 0 if math.isfinite(float(tensor.sum())) else int((~torch.isfinite(tensor)).sum())
