"""Sharded checkpoint, checkpoint of a run, or any other form -> Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.convert.building import Building, Built, Show, planned_files
from moerl.convert.carrying import carried_out
from moerl.convert.fp8_folders import fp8_blocks, fp8_names, quantization_config, with_scales
from moerl.convert.imports import Options, elements_by_dtype, manifest_of, record_of, refuse_same_folder
from moerl.convert.places import Place
from moerl.convert.precision import FP8_BLOCK, cast, written_dtype
from moerl.manifest import HF_MANIFEST, write_manifest
from moerl.models.carried import Carried
from moerl.models.disk import DiskTensor, disk_tensors
from moerl.models.hf_export import copied_files, copy_settings, shard_name, write_index
from moerl.models.hf_folder import WeightSource
from moerl.tensor_file import Described
from moerl.world import World

MAX_SHARD_BYTES = 5_000_000_000
"""Of one file, as on the hub."""


@dataclass(frozen=True)
class Export:
    """What a folder is to hold."""

    tensors: Sequence[Described]
    """In order."""
    make: Callable[[Sequence[Described]], Iterator[Tensor]]
    """The values of some of them that stand in one file, in order; threads call it."""
    words: str
    """What tells values in this form from those in another."""
    followers: frozenset[str] = frozenset()
    """Names of scales, which stand in the file of the weight before them."""
    quantisation: Mapping[str, Any] | None = None
    """For config.json."""
    more_files: Mapping[str, bytes] = field(default_factory=dict)


def export_checkpoint(
    place: Place,
    out: Path,
    options: Options,
    *,
    world: World = World(),  # noqa: B008  frozen
    show: Show | None = None,
) -> Built | None:
    """Write the model of `place` as a Hugging Face folder that transformers and SGLang load.

    Returns:
        What was written; None in other processes than the first.

    Raises:
        ConfigError: an existing target, or FP8 of experts that have no such layout.
        CheckpointError: what `Place.open` and `copied_files` refuse, values that do not fit the type, or a disk that
            does.
    """
    refuse_same_folder(place, out)
    copied_files(place.settings)
    rules = place.family.weight_rules(place.hf)
    quantised = fp8_names(rules) if options.fp8_blocks else frozenset()
    source, carried = place.open(options.allowed), place.carried(options.allowed)
    held = {tensor.name: tensor for tensor in disk_tensors(place.family, place.hf)}
    others = carried_out(carried, rules, options.dtype, quantised)
    quantised |= others.quantised
    copies = place.repeated(options.allowed)
    own = with_copies(plain_tensors(held.values(), source, options.dtype), copies)
    stored, scales = with_scales([*own, *others.tensors], quantised)

    def get(name: str) -> Tensor:
        name = copies.get(name, name)
        return held[name].make(source.get) if name in held else others.get(name)

    def make(tensors: Sequence[Described]) -> Iterator[Tensor]:
        for described in tensors:
            if described.name in quantised:
                yield from fp8_blocks(described.name, get(described.name))
            elif described.name not in scales:
                yield cast(described.name, get(described.name), described.dtype)

    export = Export(
        stored,
        make,
        words=FP8_BLOCK if options.fp8_blocks else str(options.dtype),
        followers=scales | others.followers,
        quantisation=quantization_config(rules, quantised, others.tensors) if options.fp8_blocks else None,
    )
    return write_folder(place, out, options, export, (source, carried), world=world, show=show)


def plain_tensors(held: Iterable[DiskTensor], source: WeightSource, dtype: torch.dtype | None) -> list[Described]:
    """Every tensor of the model in the type in which it is written where it is not quantised."""
    return [
        Described(tensor.name, written_dtype(tensor.rule, source.dtype(tensor.first), dtype), tensor.shape)
        for tensor in held
    ]


def with_copies(tensors: Sequence[Described], copies: Mapping[str, str]) -> list[Described]:
    """`tensors`, then those that are the same as one of them (`copies`: name -> name of the original)."""
    known = {tensor.name: tensor for tensor in tensors}
    return [*tensors, *(replace(known[original], name=name) for name, original in copies.items())]


def write_folder(
    place: Place,
    out: Path,
    options: Options,
    export: Export,
    read: tuple[WeightSource, Carried],
    *,
    world: World = World(),  # noqa: B008  frozen
    show: Show | None = None,
) -> Built | None:
    """Build the folder; see `export_checkpoint`. `read`: the model, and what goes with it."""
    carried = read[1]
    size, followers = options.max_file_bytes, export.followers
    count = len(planned_files(export.tensors, size, str, followers=followers)[1])
    files, _ = planned_files(export.tensors, size, lambda i: shard_name(i, count), followers=followers)
    plain = [tensor for tensor in export.tensors if tensor.name not in followers and tensor.dtype.itemsize > 1]

    def finish(folder: Path, built: Built) -> None:
        if count > 1:
            write_index(folder, {tensor.name: file.name for file in files for tensor in file.tensors}, built.num_bytes)
        copy_settings(place.settings, folder, elements_by_dtype(plain), quantisation=export.quantisation)
        for name, content in export.more_files.items():
            (folder / name).write_bytes(content)
        write_manifest(folder, manifest_of(folder, built, record), name=HF_MANIFEST)

    record, warning = record_of(place, *read, options), place.carried_warning(carried)
    identity = {"from": place.identity(), "to": "huggingface", "dtype": export.words}
    held = place.summed_files() if options.holds_sums else {}
    building = Building(out, files, identity, world=world, overwrite=options.overwrite, held=held)
    built = building.build(lambda i: export.make(files[i].tensors), finish, threads=options.threads, show=show)
    return built if built is None or warning is None else replace(built, warnings=(warning,))
