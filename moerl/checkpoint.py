"""Checkpoints of a whole run: learner files, loop state, a manifest; complete or absent, never half there.

A checkpoint is a folder `step_000010`. It is written under another name, flushed to the disk, given a manifest with
the size and SHA-256 of every file (and of the manifest itself), and renamed last; it is renamed first when it is
deleted. So a kill at any moment leaves whole checkpoints only, also of one rank, and also of a save in the background.
Nothing in it is a pickle.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from moerl.array_state import join_arrays, load_arrays, save_arrays, split_arrays
from moerl.errors import DISK_ERRORS, CheckpointError
from moerl.manifest import MANIFEST, check_file, read_manifest, sums_of, sync, write_manifest
from moerl.world import Alone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moerl.protocols import Policy, Team

logger = logging.getLogger(__name__)

LOOP_STATE = "loop.json"
LOOP_ARRAYS = "loop.safetensors"
"""Arrays of the loop's state; there only where it has any."""
LEARNER = "learner"

PATIENCE_SECONDS = 1800
"""How long the leader waits for another rank's part once its own is written."""

_NAME = re.compile(r"step_(\d{6,})")
_HIDDEN = ".partial-"
"""Prefix of what is not a checkpoint yet, or no longer."""


class _OtherModelError(CheckpointError):
    """A whole checkpoint, but of another model: going back to an earlier one would not help."""


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk, its manifest read."""

    folder: Path
    step: int
    manifest: Mapping[str, Any]

    @property
    def learner(self) -> Path:
        """Folder of the learner's own files."""
        return self.folder / LEARNER

    def loop_state(self) -> dict[str, Any]:
        """What `CheckpointStore.save` was given, tuples as lists."""
        return join_arrays((self.folder / LOOP_STATE).read_text(), load_arrays(self.folder / LOOP_ARRAYS))


class CheckpointStore:
    """The checkpoints of one run folder."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        model_id: str,
        config_id: str = "",
        team: Team | None = None,
        in_background: bool = False,
    ) -> None:
        """`model_id` identifies the architecture; a checkpoint of another one is refused.

        Args:
            folder: `<run>/checkpoints`; made on the first save. Every rank of `team` must see it.
            keep: newest complete checkpoints to keep, at least 1.
            model_id: digest of the model's configuration.
            config_id: digest of the run's configuration, for the manifest.
            team: ranks that save together; None is one process.
            in_background: a save returns once the learner's state is copied, and the rest is done beside training.
        """
        self.folder = folder
        self._keep = max(1, keep)
        self._ids = {"model_id": model_id, "config_id": config_id}
        self._team: Team = team or Alone()
        self._background = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._pending: Future[None] | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the save in the background; where something else failed already, that is what is told."""
        if error is None:
            self.wait()
        elif self._pending is not None:
            wait_for([self._pending])

    def save(self, step: int, policy: Policy, loop_state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, then drop those beyond `keep` and those of later steps.

        Every rank writes its part of the learner into the folder that the leader made, and the checksums of that; the
        leader does the rest once all have. Later steps are there only where the run went back behind a damaged
        checkpoint: they are no part of its path. In the background, what fails is raised by the next call.

        Raises:
            CheckpointError: it, or the one before, could not be written (a full disk, say); earlier ones are untouched.
        """
        self.wait()
        final = self.folder / f"step_{step:06d}"
        partial = self.folder / f"{_HIDDEN}{final.name}"
        learner = partial / LEARNER
        state = split_arrays(loop_state if self._team.is_leader else {})
        with _disk_errors(final), ExitStack() as stack:
            if self._team.is_leader:
                stack.callback(shutil.rmtree, partial, ignore_errors=True)
                self.sweep()
                learner.mkdir(parents=True)
            self._team.meet()
            in_background = self._background is not None
            work = policy.begin_save(learner) if in_background else functools.partial(policy.save, learner)
            stack.pop_all()
        write = functools.partial(self._write, step, work, state)
        if self._background is not None:
            self._pending = self._background.submit(write)
        else:
            self._settle(final, write)
        return final

    def wait(self) -> None:
        """Until the save in the background, if there is one, has its name on every rank.

        Raises:
            CheckpointError: it could not be written; earlier ones are untouched.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._settle(self.folder, pending.result)

    def _settle(self, target: Path, finish: Callable[[], None]) -> None:
        """`finish` on every rank; what fails on one fails on all."""
        failure = None
        with ExitStack() as stack:
            if self._team.is_leader:
                stack.callback(self.sweep)  # what failed; not before every rank is done with it
            try:
                finish()
            except CheckpointError as error:
                failure = error
            if self._team.any(failure is not None):
                raise failure or CheckpointError(f"cannot write {target}: another rank failed, see its message")

    def _write(self, step: int, work: Callable[[], None], state: tuple[str, dict[str, np.ndarray]]) -> None:
        """This rank's part of a checkpoint, and on the leader, what makes it one."""
        final = self.folder / f"step_{step:06d}"
        partial = self.folder / f"{_HIDDEN}{final.name}"
        with _disk_errors(final):
            files = self._write_part(partial, work)
            if not self._team.is_leader:
                return
            for other in range(1, self._team.size):
                files |= _told(partial, other)
            (partial / LOOP_STATE).write_text(state[0])
            save_arrays(state[1], partial / LOOP_ARRAYS)
            left = [path for path in partial.rglob("*") if path.relative_to(partial).as_posix() not in files]
            files |= sums_of(partial, left)
            write_manifest(partial, {"step": step, **self._ids, "files": dict(sorted(files.items()))})
            replaced = _hide(final)
            partial.rename(final)
            sync(self.folder)
            _clear(replaced)
            self._prune(step)

    def _write_part(self, partial: Path, work: Callable[[], None]) -> dict[str, dict[str, Any]]:
        rank = self._team.rank
        try:
            work()
            files = sums_of(partial, (partial / LEARNER).rglob(f"rank_{rank:05d}.*"))
        except (OSError, SafetensorError) as error:
            _tell(partial, rank, {"error": str(error)})
            raise
        _tell(partial, rank, {"files": files})
        return files

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; complete ones only, since the name comes last."""
        if not self.folder.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name, path in named if name and (path / MANIFEST).is_file())

    def open(self, step: int, *, is_checked: bool = False) -> Checkpoint:
        """The checkpoint of `step`, every file checked against the manifest, unless another rank did that.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
        folder = self.folder / f"step_{step:06d}"
        if step not in self.steps():
            raise CheckpointError(f"{folder} is no complete checkpoint; there are steps {self.steps()}")
        manifest = read_manifest(folder / MANIFEST, step)
        for name, entry in ({} if is_checked else manifest["files"]).items():
            check_file(folder / name, entry)
        found, wanted = manifest["model_id"], self._ids["model_id"]
        if found != wanted:
            raise _OtherModelError(
                f"{folder} was made by another model ({found[:12]}, this one is {wanted[:12]}); use its own config, or "
                "another run.name"
            )
        return Checkpoint(folder, step, manifest)

    def latest(self, *, on_corrupt: str) -> Checkpoint | None:
        """The newest usable checkpoint; None where there is none at all.

        Args:
            on_corrupt: `refuse` raises on a damaged newest one; `previous` warns and goes back until one is whole.

        Raises:
            CheckpointError: damaged (`refuse`), all damaged (`previous`), or of another model.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.open(step)
            except _OtherModelError:
                raise
            except CheckpointError as error:
                if on_corrupt != "previous":
                    raise CheckpointError(f"{error}{_previous_hint(steps, step)}") from error
                logger.warning("%s; going back to an earlier checkpoint", error)
        if steps:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged (steps {steps}); start anew with run.resume=never"
            )
        return None

    def _prune(self, newest: int) -> None:
        steps = self.steps()
        kept = [step for step in steps if step <= newest][-self._keep :]
        for step in steps:
            if step not in kept:
                _remove(self.folder / f"step_{step:06d}")

    def sweep(self) -> None:
        """Clear away what a killed process left half written or half deleted."""
        for path in self.folder.glob(f"{_HIDDEN}*"):
            shutil.rmtree(path, ignore_errors=True)


def _note(folder: Path, rank: int) -> Path:
    return folder / f".rank_{rank:05d}.json"


def _tell(folder: Path, rank: int, outcome: Mapping[str, Any]) -> None:
    """Let the leader know what became of a rank's part. On the disk, where the part is too: no process group is used
    while training goes on. Whole or not at all.
    """
    if rank == 0:
        return
    path = _note(folder, rank)
    with suppress(OSError):  # a disk that takes no note either: the leader gives up by itself
        path.with_suffix(".new").write_text(json.dumps(outcome))
        path.with_suffix(".new").rename(path)


def _told(folder: Path, rank: int) -> dict[str, Any]:
    """Wait for what `rank` tells; its files.

    Raises:
        CheckpointError: it failed, or told nothing for long.
    """
    path = _note(folder, rank)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            raise CheckpointError(f"rank {rank} has not written its part of {folder} in {PATIENCE_SECONDS} s")
        time.sleep(0.005)
    outcome = json.loads(path.read_text())
    path.unlink()
    if "error" in outcome:
        raise CheckpointError(f"rank {rank}: {outcome['error']}")
    return outcome["files"]


def _remove(folder: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a kill in between leaves no half one under it."""
    _clear(_hide(folder))


def _hide(folder: Path) -> Path | None:
    """Take a checkpoint's name, where there is one; where it lies then."""
    if not folder.exists():
        return None
    doomed = folder.with_name(f"{_HIDDEN}deleted-{folder.name}")
    folder.rename(doomed)
    return doomed


def _clear(hidden: Path | None) -> None:
    if hidden is not None:
        shutil.rmtree(hidden, ignore_errors=True)


def _previous_hint(steps: list[int], step: int) -> str:
    earlier = [s for s in steps if s < step]
    if earlier:
        return f"; checkpoint.on_corrupt=previous goes on from step {earlier[-1]}"
    return "; there is no earlier one: start anew with run.resume=never"


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Safetensors has an error of its own for what the disk refused."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in DISK_ERRORS:
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"cannot write checkpoint {target} ({reason}); earlier checkpoints are untouched: free space or "
            "point run.output_dir elsewhere, then start the same command again"
        ) from error
