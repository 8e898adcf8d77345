"""Sharded checkpoint, checkpoint of a run, or any other form -> Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from moerl.convert.building import Building, Built, Show, planned_files
from moerl.convert.fp8_folders import fp8_blocks, fp8_names, quantization_config, with_scales
from moerl.convert.imports import Options, elements_by_dtype, left_out, manifest_of, refuse_same_folder
from moerl.convert.places import HF_MANIFEST, Place
from moerl.convert.precision import FP8_BLOCK, cast, written_dtype
from moerl.manifest import write_manifest
from moerl.models.disk import disk_tensors
from moerl.models.hf_export import copy_settings, shard_name, write_index
from moerl.tensor_file import Described
from moerl.world import World

MAX_SHARD_BYTES = 5_000_000_000
"""Of one file, as on the hub."""


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
        CheckpointError: what `Place.open` refuses, values that do not fit the type, or a disk that does.
    """
    refuse_same_folder(place, out)
    rules = place.family.weight_rules(place.hf)
    quantised = fp8_names(rules) if options.fp8_blocks else frozenset()
    source = place.open(options.allowed)
    held = {tensor.name: tensor for tensor in disk_tensors(place.family, place.hf)}
    tensors = [
        Described(name, written_dtype(tensor.rule, source.dtype(tensor.first), options.dtype), tensor.shape)
        for name, tensor in held.items()
    ]
    stored, scales = with_scales(tensors, quantised)
    count = len(planned_files(stored, options.max_file_bytes, str, followers=scales)[1])
    files, _ = planned_files(stored, options.max_file_bytes, lambda i: shard_name(i, count), followers=scales)

    def make(number: int) -> Iterator[Tensor]:
        for described in files[number].tensors:
            if described.name in quantised:
                yield from fp8_blocks(described.name, held[described.name].make(source.get))
            elif described.name not in scales:
                yield cast(described.name, held[described.name].make(source.get), described.dtype)

    def finish(folder: Path, built: Built) -> None:
        if count > 1:
            write_index(folder, {tensor.name: file.name for file in files for tensor in file.tensors}, built.num_bytes)
        settings = quantization_config(rules, quantised) if options.fp8_blocks else None
        copy_settings(place.settings, folder, elements_by_dtype(tensors), quantisation=settings)
        content = manifest_of(place, folder, built, options, left_out(place, source))
        write_manifest(folder, content, name=HF_MANIFEST)

    dtype = FP8_BLOCK if options.fp8_blocks else str(options.dtype)
    identity = {"from": place.identity(), "to": "huggingface", "dtype": dtype}
    building = Building(out, files, identity, world=world, overwrite=options.overwrite)
    return building.build(make, finish, threads=options.threads, show=show)
