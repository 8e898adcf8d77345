"""Write a Hugging Face folder: stream tensors into shards, copy what belongs to the tokenizer, appear all at once."""

from __future__ import annotations

import glob
import json
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.manifest import HF_MANIFEST, sums_of, sync, write_manifest
from moerl.models.hf_folder import INDEX_FILE, SINGLE_FILE, read_config
from moerl.models.quantised import without_quantisation
from moerl.tensor_file import Described, TensorFileWriter

COPIED_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Patterns of what is taken from the source folder where it has it; and its modules and templates, see `copied_files`.

Mistral's own tokenizer, which transformers takes for Mixtral where mistral-common is installed, reads `tekken.json`,
else the last `tokenizer.model.v*`, whose name says how prompts are written; `tokenizer.model` alone is version 1.
"""
TEMPLATES = "additional_chat_templates"
"""A folder where transformers keeps chat templates that have names, one a file."""
FOREIGN_SECONDS = 86400.0
"""After which what a process of another machine has is taken for left behind."""
_OWNER = re.compile(r"(?:(?P<host>\w+)-(?P<number>\d+)-[0-9a-f]{8}|\d+)(?:-\w+)?", re.ASCII)
"""What comes after the beginning of a leftover's name."""

_CASTABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def write_hf_folder(
    out: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    source_folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    kept_names: frozenset[str] = frozenset(),
    max_shard_bytes: int = 5_000_000_000,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write `tensors` (Hugging Face names, any order) and the configuration and tokenizer of `source_folder` to `out`.

    The folder is built beside `out` and renamed, so `out` is never half written; an older `out` is replaced. Holds at
    most one shard in memory. The same tensors in the same order give the same bytes. `dtype` casts tensors of 16 to 64
    bit floats; None keeps them, and `kept_names` keep theirs either way. `record`: what a manifest says beside the
    checksums of the files; None writes none.

    Raises:
        CheckpointError: a name comes twice, there are no tensors, one is not finite in the dtype it is written in, a
            file of the tokenizer is a link out of its folder, or the disk refuses; `out` is then as it was.
        DataError: `source_folder` has no readable config.json.
    """
    out, source = Path(out), Path(source_folder)
    read_config(source)
    copied_files(source)
    building = leftover(out, "building")
    try:
        sweep(out, "building")
        building.mkdir(parents=True)
        writer = _ShardWriter(building, out, dtype, kept_names, max_shard_bytes)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.finish()
        copy_settings(source, building, writer.dtypes)
        if record is not None:
            others = [path for path in building.rglob("*") if path.relative_to(building).as_posix() not in writer.sums]
            files = {**writer.sums, **sums_of(building, others)}
            write_manifest(building, {"step": 0, "files": files, **record}, name=HF_MANIFEST)
        _sync_files(building)
        put_in_place(building, out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out} ({error}); free space or choose another folder") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


class _ShardWriter:
    """Collects tensors up to a size and writes them; names files once their number is known."""

    def __init__(
        self,
        folder: Path,
        out: Path,
        dtype: torch.dtype | None,
        kept_names: frozenset[str],
        max_shard_bytes: int,
    ) -> None:
        self._folder = folder
        self._out = out
        self._dtype = dtype
        self._kept_names = kept_names
        self._max_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []
        self._seen: set[str] = set()
        self.dtypes: dict[torch.dtype, int] = {}
        """Elements written in each floating dtype."""
        self.sums: dict[str, dict[str, Any]] = {}
        """File -> size and checksum, once they have their final names."""
        self._part_sums: list[dict[str, Any]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is cast and copied, so the caller may change it afterwards."""
        if name in self._seen:
            raise CheckpointError(f"tensor {name!r} came twice; a name must be unique in a folder")
        self._seen.add(name)
        castable = tensor.dtype in _CASTABLE
        target = tensor.dtype
        if self._dtype is not None and castable and name not in self._kept_names:
            target = self._dtype
        tensor = tensor.detach().to("cpu", target, copy=True).contiguous()
        if castable and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"{name}: {bad} of {tensor.numel()} values are not finite as {str(target).removeprefix('torch.')}, so "
                f"{self._out} was not written; export an earlier checkpoint, or in a wider format"
            )
        if tensor.is_floating_point():
            self.dtypes[target] = self.dtypes.get(target, 0) + tensor.numel()
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, give the shards their final names, and write the index if there are several."""
        if not self._seen:
            raise CheckpointError(f"no tensors to write into {self._folder.parent}")
        self._flush()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = shard_name(number, count)
            self._part(number).rename(self._folder / file)
            self.sums[file] = self._part_sums[number]
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            write_index(self._folder, weight_map, self._total_bytes)

    def _flush(self) -> None:
        described = [Described(name, one.dtype, tuple(one.shape)) for name, one in self._pending.items()]
        writer = TensorFileWriter(self._part(len(self._shards)), described)
        with writer:
            for tensor in self._pending.values():
                writer.add(tensor)
        self._part_sums.append(writer.sum())
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def shard_name(number: int, count: int) -> str:
    """Of file `number`, from 0, of `count`."""
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Which file has which tensor, and the bytes of all."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)


def copy_settings(
    source: Path,
    folder: Path,
    dtypes: Mapping[torch.dtype, int],
    *,
    quantisation: Mapping[str, object] | None = None,
) -> None:
    """Configuration, with the type that most elements of `dtypes` have, tokenizer and what belongs to it.

    What the source says of how its own weights are quantised does not come along; `quantisation` takes its place. The
    source's Python modules, which its `auto_map` may name, are copied and never run.

    Raises:
        CheckpointError: as `copied_files`.
    """
    config = _with_dtype(without_quantisation(read_config(source)), dtypes)
    if quantisation is not None:
        config["quantization_config"] = dict(quantisation)
    _write_json(folder / "config.json", config)
    for file in copied_files(source):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, folder / file)


def copied_files(source: Path) -> list[str]:
    """Names below `source` of the files that go along with weights: of the tokenizer, modules and templates.

    `auto_map` names some modules and those import others, so all go along.

    Raises:
        CheckpointError: one is a link that leads out of the folder; names it.
    """
    return [file for pattern in (*COPIED_FILES, "*.py", f"{TEMPLATES}/*.jinja") for file in _own_files(source, pattern)]


def _own_files(source: Path, pattern: str) -> list[str]:
    """Names below `source` of its own files.

    A link counts where it leads to a file of the folder or, as in the hub's cache (`snapshots/<revision>`) and in
    folders that its client once filled with links, to a cache's blobs. One that is no module counts also where it leads
    to the file of its own name beside weights that a link of this folder leads to, as where a whole model was linked
    but for its config.json. No other file of the machine is to end up in an export.
    """
    home = source.resolve()
    homes = {home, home / TEMPLATES} | ({home.parents[1] / "blobs"} if home.parent.name == "snapshots" else set())
    found = sorted(path for path in source.glob(pattern) if path.is_file())
    weights = {path.resolve().parent for path in source.glob("model*.safetensors") if path.is_file()}
    for path in found:
        target = path.resolve()
        is_blob = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
        is_twin = path.suffix != ".py" and target in {folder / path.relative_to(source) for folder in weights}
        if target.parent not in homes and not is_blob and not is_twin:
            raise CheckpointError(
                f"{path} is a link to {target}, outside of {source}, and would be copied into what is written; put the "
                "file itself in its place, or take the link away"
            )
    return [path.relative_to(source).as_posix() for path in found]


def _with_dtype(config: dict[str, object], dtypes: Mapping[torch.dtype, int]) -> dict[str, object]:
    """The configuration with the dtype that most elements have, under the spelling the source uses."""
    name = str(max(dtypes, key=lambda dtype: dtypes[dtype])).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, name)}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)


def put_in_place(building: Path, out: Path) -> None:
    """Rename to `out`; an older folder cannot be replaced in one step, so it is set aside, and put back on failure.

    A link, wherever it leads, is replaced itself. What killed processes set aside goes too.
    """
    aside = leftover(out, "old")
    if os.path.lexists(out):
        sweep(out, "old")  # one of a process with this number would be in the way
        out.rename(aside)
    try:
        building.rename(out)
    except OSError:
        if os.path.lexists(aside):
            aside.rename(out)
        raise
    sweep(out, "old")


def leftover(out: Path, what: str) -> Path:
    """Beside `out`: where this process has something that is in the way of nobody, and that `sweep` knows is its.

    A new name at each call, and no name of another machine's process with this number.
    """
    return out.with_name(f".{out.name}.{what}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def leftovers(out: Path, what: str) -> Iterator[tuple[Path, tuple[str, int] | None]]:
    """Every `leftover` of any process, and what begins with its name and `-`, and whose it is: (host, process).

    None: of a version that wrote the number of the process alone.
    """
    start = f".{out.name}.{what}-"
    for path in out.parent.glob(f"{glob.escape(start)}*"):
        found = _OWNER.fullmatch(path.name.removeprefix(start))
        if found is not None:
            yield path, None if found["host"] is None else (found["host"], int(found["number"]))


def sweep(out: Path, what: str) -> None:
    """Remove `leftovers` of processes that no longer live, or of this one.

    Whether a process of another machine lives is not to be seen from here: what it has goes once nothing in it was
    written for a day.
    """
    for path, owner in leftovers(out, what):
        if owner is not None and owner[0] == _host():
            is_gone = owner[1] == os.getpid() or not _lives(owner[1])
        else:
            is_gone = time.time() - _last_written(path) > FOREIGN_SECONDS
        if is_gone:
            _remove(path)


def _host() -> str:
    """Of this machine, in letters that mean nothing in the name of a file."""
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40] or "_"


def _last_written(path: Path) -> float:
    """The newest time (seconds) of a folder and all that is in it; endless where it is gone meanwhile."""
    try:
        return max(one.lstat().st_mtime for one in (path, *(() if path.is_symlink() else path.rglob("*"))))
    except FileNotFoundError:
        return math.inf


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
