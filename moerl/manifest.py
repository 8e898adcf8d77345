"""The manifest of a checkpoint: every file with its size and SHA-256, and what it is a checkpoint of.

Files of tensors that were written as a stream have a sum of their parts in place of a SHA-256 of the whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moerl.errors import CheckpointError

FORMAT = 2
"""1 had the learner's state bound to its layout."""
MANIFEST = "manifest.json"
PARTS_SUM = "sha256_of_parts"
"""In the entry of a file of tensors: `moerl.tensor_file.sum_of_parts` of its header and its tensors."""
DAMAGED = "does not match its SHA-256 in the manifest: it is damaged"
HF_MANIFEST = "moerl_manifest.json"
"""In a Hugging Face folder, where `manifest.json` may mean something else."""


def write_manifest(folder: Path, content: Mapping[str, Any], *, name: str = MANIFEST) -> None:
    """Write `content` with its format and its own checksum, and flush it and all folders to the disk."""
    manifest = {"format": FORMAT, **content}
    manifest["sha256"] = _digest(manifest)
    path = folder / name
    path.write_text(json.dumps(manifest, indent=1))
    for written in (path, *(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
        sync(written)


def read_manifest(path: Path, step: int) -> dict[str, Any]:
    """What `write_manifest` wrote.

    Raises:
        CheckpointError: damaged, of another format, or not of `step`.
    """
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


def sums_of(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Flush files of `folder` to the disk; their sizes and checksums by name."""
    sums = {}
    for path in sorted(path for path in paths if path.is_file()):
        sync(path)
        sums[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return sums


def check_file(path: Path, entry: Mapping[str, Any]) -> None:
    """Hold a file against its entry.

    Raises:
        CheckpointError: missing, or another size or checksum.
    """
    check_size(path, entry)
    if "sha256" in entry:
        if _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} {DAMAGED}")
        return
    from moerl.tensor_file import TensorFile  # needs torch

    with TensorFile(path) as file:
        check_sum(file.path, entry, file.sum())


def check_sum(path: Path, entry: Mapping[str, Any], found: str) -> None:
    """Hold the sum of a file's parts against its entry.

    Raises:
        CheckpointError: another one.
    """
    if found != entry[PARTS_SUM]:
        raise CheckpointError(f"{path} {DAMAGED}")


def check_size(path: Path, entry: Mapping[str, Any]) -> None:
    """Hold the size of a file against its entry.

    Raises:
        CheckpointError: missing, or another size.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing from its checkpoint")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(
            f"{path} has {size} bytes, its manifest says {entry['bytes']}: it is truncated or was changed"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
