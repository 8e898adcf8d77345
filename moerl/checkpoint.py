"""Checkpoints of a whole run: learner files, loop state, a manifest; complete or absent, never half there.

A checkpoint is a folder `step_000010`. It is written under another name, flushed to the disk, given a manifest with
the size and SHA-256 of every file, and renamed last; so a kill at any moment leaves the previous one untouched. Nothing
in it is a pickle.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moerl.protocols import Policy

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
LOOP_STATE = "loop.json"
LEARNER = "learner"


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

    def __init__(self, folder: Path, *, keep: int, model_id: str) -> None:
        """`model_id` identifies the architecture; a checkpoint of another one is refused.

        Args:
            folder: `<run>/checkpoints`; made on the first save.
            keep: newest complete checkpoints to keep, at least 1.
            model_id: digest of the model's configuration.
        """
        self.folder = folder
        self._keep = max(1, keep)
        self._model_id = model_id

    def save(self, step: int, policy: Policy, loop_state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step` and drop those beyond `keep`.

        Raises:
            CheckpointError: it could not be written (a full disk, say); earlier checkpoints are untouched.
        """
        final = self.folder / f"step_{step:06d}"
        partial = self.folder / f".partial-step_{step:06d}"
        with _disk_errors(final):
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            try:
                (partial / LEARNER).mkdir(parents=True)
                policy.save(partial / LEARNER)
                (partial / LOOP_STATE).write_text(json.dumps(loop_state, allow_nan=False))
                self._write_manifest(partial, step)
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
                _sync(self.folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        self._prune()
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; complete ones only, since the name comes last."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name.removeprefix("step_")) for p in self.folder.glob("step_*") if (p / MANIFEST).is_file())

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of `step`, every file checked against the manifest.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
        folder = self.folder / f"step_{step:06d}"
        if step not in self.steps():
            raise CheckpointError(f"{folder} is no complete checkpoint; there are steps {self.steps()}")
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / MANIFEST} is damaged ({error})") from error
        for name, entry in manifest["files"].items():
            _check_file(folder / name, entry)
        if manifest["model_id"] != self._model_id:
            raise CheckpointError(
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
            except CheckpointError as error:
                if on_corrupt != "previous" or "another model" in str(error):
                    hint = "" if "another model" in str(error) else _previous_hint(steps, step)
                    raise CheckpointError(f"{error}{hint}") from error
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
        path = folder / MANIFEST
        path.write_text(json.dumps(manifest, indent=1))
        _sync(path)
        _sync(folder)

    def _prune(self) -> None:
        for step in self.steps()[: -self._keep]:
            shutil.rmtree(self.folder / f"step_{step:06d}", ignore_errors=True)


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
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise CheckpointError(
            f"cannot write checkpoint {target} ({error.strerror}); earlier checkpoints are untouched: free space or "
            "point run.output_dir elsewhere, then start the same command again"
        ) from error
