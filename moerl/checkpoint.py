"""Checkpoints of a whole run: learner files, loop state, a manifest; complete or absent, never half there.

A checkpoint is a folder `step_000010`. It is written under another name, flushed to the disk, given a manifest with
the size and SHA-256 of every file (and of the manifest itself), and renamed last; it is renamed first when it is
deleted. So a kill at any moment leaves whole checkpoints only. Nothing in it is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from moerl.errors import DISK_ERRORS, CheckpointError
from moerl.world import Alone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moerl.protocols import Policy, Team

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
LOOP_STATE = "loop.json"
LEARNER = "learner"

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
        """What `CheckpointStore.save` was given."""
        return json.loads((self.folder / LOOP_STATE).read_text())


class CheckpointStore:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, *, keep: int, model_id: str, team: Team | None = None) -> None:
        """`model_id` identifies the architecture; a checkpoint of another one is refused.

        Args:
            folder: `<run>/checkpoints`; made on the first save. Every rank of `team` must see it.
            keep: newest complete checkpoints to keep, at least 1.
            model_id: digest of the model's configuration.
            team: ranks that save together; None is one process.
        """
        self.folder = folder
        self._keep = max(1, keep)
        self._model_id = model_id
        self._team: Team = team or Alone()

    def save(self, step: int, policy: Policy, loop_state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, then drop those beyond `keep` and those of later steps.

        Every rank writes its part of the learner into the folder that the leader made; the leader does the rest, and
        all return once the checkpoint has its name. Later steps are there only where the run went back behind a damaged
        checkpoint: they are no part of its path.

        Raises:
            CheckpointError: it could not be written (a full disk, say); earlier checkpoints are untouched.
        """
        final = self.folder / f"step_{step:06d}"
        partial = self.folder / f"{_HIDDEN}{final.name}"
        is_leader = self._team.is_leader
        with _disk_errors(final):
            try:
                if is_leader:
                    self.sweep()
                    (partial / LEARNER).mkdir(parents=True)
                self._team.meet()
                policy.save(partial / LEARNER)
                self._team.meet()
                if is_leader:
                    self._complete(partial, final, step, loop_state)
            finally:
                if is_leader:
                    shutil.rmtree(partial, ignore_errors=True)  # there only where something failed
            if is_leader:
                self._prune(step)
            self._team.meet()
        return final

    def _complete(self, partial: Path, final: Path, step: int, loop_state: Mapping[str, Any]) -> None:
        (partial / LOOP_STATE).write_text(json.dumps(loop_state, allow_nan=False))
        self._write_manifest(partial, step)
        _remove(final)
        partial.rename(final)
        _sync(self.folder)

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
        manifest = _read_manifest(folder / MANIFEST, step)
        for name, entry in ({} if is_checked else manifest["files"]).items():
            _check_file(folder / name, entry)
        if manifest["model_id"] != self._model_id:
            raise _OtherModelError(
                f"{folder} was made by another model ({manifest['model_id'][:12]}, this one is {self._model_id[:12]}); "
                "use its own config, or another run.name"
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

    def _write_manifest(self, folder: Path, step: int) -> None:
        files = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            _sync(path)
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        manifest = {"format": FORMAT, "step": step, "model_id": self._model_id, "files": files}
        manifest["sha256"] = _digest(manifest)
        path = folder / MANIFEST
        path.write_text(json.dumps(manifest, indent=1))
        _sync(path)
        _sync(folder)

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


def _remove(folder: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a kill in between leaves no half one under it."""
    if not folder.exists():
        return
    doomed = folder.with_name(f"{_HIDDEN}deleted-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _read_manifest(path: Path, step: int) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("sha256") != _digest(manifest):
        raise CheckpointError(f"{path} is damaged (it does not match its own SHA-256)")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, this version reads {FORMAT}; use the version that wrote it"
        )
    if manifest["step"] != step:
        raise CheckpointError(f"{path} is of step {manifest['step']}: the folder was renamed, give it its name back")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _previous_hint(steps: list[int], step: int) -> str:
    earlier = [s for s in steps if s < step]
    if earlier:
        return f"; checkpoint.on_corrupt=previous goes on from step {earlier[-1]}"
    return "; there is no earlier one: start anew with run.resume=never"


def _check_file(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing from its checkpoint")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(
            f"{path} has {size} bytes, its manifest says {entry['bytes']}: it is truncated or was changed"
        )
    if _sha256(path) != entry["sha256"]:
        raise CheckpointError(f"{path} does not match its SHA-256 in the manifest: it is damaged")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
