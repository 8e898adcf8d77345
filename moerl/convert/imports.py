"""Hugging Face folder (or any other form) -> sharded checkpoint, from which any layout starts."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.convert.building import Building, Built, PlannedFile, Show, planned_files
from moerl.convert.layouts import Layout, pieces_by_ranks
from moerl.convert.places import Place
from moerl.convert.precision import cast, check_stacked, check_written, dtype_of
from moerl.errors import ConfigError
from moerl.manifest import sums_of, write_manifest
from moerl.models.carried import Carried, carried_file, carried_record, kinds_of, write_carried_index
from moerl.models.hf_export import copied_files, copy_settings
from moerl.models.hf_folder import WeightSource
from moerl.models.repeated import RECORD
from moerl.models.rules import GateUp, Rule
from moerl.models.sharded import Piece
from moerl.shards import FORMAT, files_of
from moerl.tensor_file import Described
from moerl.world import World

MAX_FILE_BYTES = 2_000_000_000
"""Of one file: what a kill may cost a thread."""


@dataclass(frozen=True)
class Options:
    """How to convert."""

    dtype: torch.dtype | None = None
    """None keeps every type. Routers and their biases keep theirs either way."""
    fp8_blocks: bool = False
    """Of an export: the weights of linear layers as FP8 with a scale for each block, the rest as `dtype`."""
    allowed: tuple[str, ...] = ()
    """Regular expressions of tensors that may be left out."""
    max_file_bytes: int = MAX_FILE_BYTES
    threads: int = 1
    overwrite: bool = False
    holds_sums: bool = False
    """Hold files of tensors against the source's manifest as they are read; all else is for `refuse_damage`, before."""


def import_checkpoint(
    place: Place,
    out: Path,
    layout: Layout,
    options: Options,
    *,
    world: World = World(),  # noqa: B008  frozen
    show: Show | None = None,
) -> Built | None:
    """Write the model of `place` as a sharded checkpoint with configuration, tokenizer and carried tensors.

    Returns:
        What was written; None in other processes than the first.

    Raises:
        ConfigError: sizes that do not divide the model, tensors of several types in one parameter, an existing target.
        CheckpointError: what `Place.open` and `copied_files` refuse, values that do not fit the type, or a disk that
            does.
    """
    refuse_same_folder(place, out)
    copied_files(place.settings)
    source = place.open(options.allowed)
    rules = place.family.weight_rules(place.hf)
    groups = list(pieces_by_ranks(rules, layout).values())
    dtypes = {rule.megatron_name: dtype_of(rule, source, options.dtype) for rule in rules}
    check_written(dtypes)
    check_stacked((piece.key, piece.rule, dtypes[piece.rule.megatron_name]) for held in groups for piece in held)
    files: list[PlannedFile] = []
    contents: list[Sequence[Piece]] = []
    for held in groups:
        followers = frozenset(b.name for a, b in itertools.pairwise(held) if _read_for(a) == _read_for(b))
        described = [Described(piece.name, dtypes[piece.rule.megatron_name], piece.extent) for piece in held]
        start = len(files)
        made, spans = planned_files(
            described, options.max_file_bytes, lambda i, s=start: _file_name(s + i), followers=followers
        )
        files += [file for file in made if file.tensors]
        contents += [[held[i] for i in span] for span in spans if span]
    parts, carried = _Parts(source), place.carried(options.allowed)
    extra = carried_files(carried, options.max_file_bytes)

    def make(number: int) -> Iterator[Tensor]:
        if number >= len(files):
            yield from (carried.stored.get(tensor.name) for tensor in extra[number - len(files)].tensors)
            return
        for piece in contents[number]:
            yield cast(piece.name, parts.read(piece), dtypes[piece.rule.megatron_name])

    def finish(folder: Path, built: Built) -> None:
        _describe(folder, contents, dtypes, layout)
        if extra:
            write_carried_index(folder, carried, {one.name: file.name for file in extra for one in file.tensors})
        copy_settings(place.settings, folder, elements_by_dtype(tensor for file in files for tensor in file.tensors))
        write_manifest(folder, manifest_of(folder, built, record))

    record = record_of(place, source, carried, options)
    identity = {"from": place.identity(), "to": "megatron", "dtype": str(options.dtype)}
    held = place.summed_files() if options.holds_sums else {}
    building = Building(out, [*files, *extra], identity, world=world, overwrite=options.overwrite, held=held)
    return building.build(make, finish, threads=options.threads, show=show)


def _read_for(piece: Piece) -> tuple[str, ...]:
    """The tensors of the source that a box is cut from; boxes of the same ones lie in one file, which reads them once.

    Of gate and up, which lie one after the other, only the one it is of.
    """
    rule = piece.rule
    if not isinstance(rule, GateUp):
        return rule.hf_names
    return (rule.hf_names[piece.start[0] // (rule.megatron_shape()[0] // rule.num_blocks)],)


class _Parts:
    """Reads boxes of parameters, and those of the same tensors that follow one another once; threads may share one."""

    def __init__(self, source: WeightSource) -> None:
        """`source` under on-disk names."""
        self._source = source
        self._last = threading.local()

    def read(self, piece: Piece) -> Tensor:
        """The box, with as many axes as the tensor in the files; often a view of what is kept for the next ones."""
        rule, names = piece.rule, _read_for(piece)
        whole = self._whole(rule, names)
        if not isinstance(rule, GateUp):
            return piece.cut(whole)
        first = piece.start[0] % whole.shape[0]
        part = whole[first : first + piece.size[0]]
        return part if rule.expert is None else part[None]

    def _whole(self, rule: Rule, names: tuple[str, ...]) -> Tensor:
        """The parameter, or the one of gate and up that is in `names`."""
        last = vars(self._last).get("found")
        if last is None or last[0] != names:
            last = self._last.found = None  # gone before the next one comes
            tensors = {name: self._source.get(name) for name in names}
            whole = tensors[names[0]] if isinstance(rule, GateUp) else rule.to_megatron(tensors)
            last = self._last.found = (names, whole)
        return last[1]


def refuse_same_folder(place: Place, out: Path) -> None:
    """Raises ConfigError where the target is, or lies around or inside, what is read, by whatever links it is named."""
    plain = Path(os.path.normpath(out.absolute()))  # as `Building` has it; a target that is a link is replaced itself
    target = Path(os.path.realpath(plain.parent)) / plain.name
    for folder in {Path(os.path.realpath(path)) for path in (place.weights, place.settings, place.path)}:
        if target == folder or target in folder.parents or folder in target.parents:
            raise ConfigError(f"{out} and {folder} lie inside one another; choose a target outside of what is read")


def carried_files(carried: Carried, max_bytes: int) -> list[PlannedFile]:
    """The files of their own that a sharded checkpoint has for them."""
    described = [Described(name, carried.stored.dtype(name), carried.stored.shape(name)) for name in carried.names]
    return [file for file in planned_files(described, max_bytes, carried_file)[0] if file.tensors]


def left_out(place: Place, source: WeightSource, carried: Carried, allowed: Iterable[str]) -> list[str]:
    """Names in `source` that no rule reads, that are not carried, and that are no copies of others; and scales of a
    key-value cache, which `source` does not show.
    """
    used = {name for rule in place.family.weight_rules(place.hf) for name in rule.hf_names}
    spare = sorted(source.names() - used - place.repeated(allowed).keys())
    known = kinds_of(spare, place.family, place.hf).keys() & carried.plain().names()
    return sorted([*(name for name in spare if name not in known), *place.cache_scales()])


def elements_by_dtype(tensors: Iterable[Described]) -> dict[torch.dtype, int]:
    """Elements in each floating type."""
    found: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            found[tensor.dtype] = found.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return found


def _file_name(number: int) -> str:
    return files_of(Path(), number)[0].name


def _describe(
    folder: Path, contents: Sequence[Sequence[Piece]], dtypes: Mapping[str, torch.dtype], layout: Layout
) -> None:
    """The description beside each file, as `moerl.shards` reads it."""
    state = {"world_size": len(contents), "layout": layout.described(), "counters": {}, "optimizer_updates": 0}
    for number, pieces in enumerate(contents):
        tensors: dict[str, Any] = {}
        for piece in pieces:
            dtype = str(dtypes[piece.rule.megatron_name]).removeprefix("torch.")
            entry = tensors.setdefault(piece.key, {"shape": list(piece.shape), "dtype": dtype, "parts": []})
            entry["parts"].append([list(piece.offset), list(piece.extent)])
        path = files_of(folder, number)[1]
        path.write_text(json.dumps({"format": FORMAT, **state, "tensors": tensors}))


def record_of(place: Place, source: WeightSource, carried: Carried, options: Options) -> dict[str, Any]:
    """What a manifest says of where the weights came from; part of it is in the source's own, so it is made first.

    Raises:
        CheckpointError: a damaged manifest of the source.
    """
    return {
        "converted_from": str(place.path),
        "allow_unmapped": list(options.allowed),
        "unmapped": left_out(place, source, carried, options.allowed),
        RECORD: place.repeated(options.allowed),
        **carried_record(carried, is_older=place.is_trained),
    }


def manifest_of(folder: Path, built: Built, record: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest of a converted folder says; `record` is `record_of` its source."""
    others = [path for path in folder.rglob("*") if path.relative_to(folder).as_posix() not in built.sums]
    return {
        "step": 0,
        "files": {**built.sums, **sums_of(folder, others)},
        "not_finite": dict(built.not_finite),
        **record,
    }
