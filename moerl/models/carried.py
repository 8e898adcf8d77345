"""Tensors that no parameter is made of, and that go with a model from form to form as they are stored.

Which they are is the family's to say (`carried_names`): layers of multi-token prediction, which engines use for
speculative decoding and nothing here trains. In a Hugging Face folder they lie among the others; a sharded checkpoint
has files of their own with an index, which also says how they are quantised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.models.family import PREDICTION, HFConfig, ModelFamily
from moerl.models.hf_folder import QUANTISATION_FIELDS, HFFolder, InMemory, WeightSource, has_weights
from moerl.models.quantised import cache_scales, plain_source, quantisation_of
from moerl.models.rules import Shape, shorten
from moerl.shards import has_shards

CARRIED_INDEX = "carried.safetensors.index.json"
"""In a sharded checkpoint: which file has which carried tensor."""
_STORAGE_FIELDS = (*QUANTISATION_FIELDS, "dtype", "torch_dtype")
"""Of config.json: what turns stored tensors into plain ones."""
_IN_LAYER = re.compile(r"\.layers\.\d+\.(.+)")
_SCALES = re.compile(r"(?<=weight)_(scale_inv|scale|packed|shape)$|_(blocks|scales)$")


def carried_file(number: int) -> str:
    """Name of a file of a sharded checkpoint."""
    return f"carried_{number:05d}.safetensors"


class _Part:
    """A `WeightSource` over some names of another one."""

    def __init__(self, source: WeightSource, names: Iterable[str]) -> None:
        self._source = source
        self._names = frozenset(names)

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> Shape:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def get(self, name: str) -> Tensor:
        return self._source.get(name)

    def get_slice(self, name: str, expert: int, start: int, stop: int) -> Tensor:
        return self._source.get_slice(name, expert, start, stop)


@dataclass(frozen=True)
class Carried:
    """What a folder has of them; possibly nothing."""

    folder: Path
    stored: WeightSource
    """As the files have them, scales of quantised ones as tensors of their own."""
    kinds: Mapping[str, tuple[str, ...]]
    """What they are -> names in `stored`, in order; no empty kinds."""
    storage: Mapping[str, Any]
    """The fields of config.json that say how they are stored."""
    files: tuple[Path, ...] = ()
    """That hold them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all kinds, as they are stored."""
        return tuple(name for names in self.kinds.values() for name in names)

    def plain(self) -> WeightSource:
        """Dequantised, under plain names.

        Raises:
            CheckpointError: a scale is missing or does not fit its weight.
        """
        return plain_source(self.stored, self.storage, is_part=True)

    def age_warning(self) -> str | None:
        """What to say where the weights beside them were trained on since; tables do not age."""
        names = self.kinds.get(PREDICTION)
        if not names:
            return None
        return (
            f"{len(names)} tensors of {PREDICTION} ({shorten(names, 2)}) are those of {self.folder}: nothing trained "
            "them, so they are older than the weights beside them, and speculative decoding with them accepts less"
        )


NOTHING_CARRIED = Carried(Path(), InMemory({}), {}, {})
"""Where a model began from no weights."""


def kinds_of(names: Iterable[str], family: ModelFamily, hf: HFConfig) -> dict[str, str]:
    """Those of `names` that the family carries, in order -> what they are."""
    patterns = {kind: [re.compile(one) for one in some] for kind, some in family.carried_names(hf).items()}
    found = {}
    for name in names:
        kind = next((kind for kind, some in patterns.items() if any(one.fullmatch(name) for one in some)), None)
        if kind is not None:
            found[name] = kind
    return found


def open_carried(folder: Path, family: ModelFamily, hf: HFConfig, allowed: Iterable[str] = ()) -> Carried:
    """The carried tensors of a Hugging Face folder or a sharded checkpoint; none where it has no weights at all.

    `allowed`: regular expressions of plain names that are left behind.

    Raises:
        CheckpointError: a missing or damaged file, one with tensors that the family does not carry, or an index that
            does not say how they are stored.
    """
    stored, storage = InMemory({}), {}
    is_sharded = has_shards(folder)
    if is_sharded and (folder / CARRIED_INDEX).is_file():
        stored = HFFolder(folder, index_file=CARRIED_INDEX)
        storage = _storage_of(folder / CARRIED_INDEX)
    elif not is_sharded and has_weights(folder):
        stored = HFFolder(folder)
        storage = {name: hf[name] for name in _STORAGE_FIELDS if name in hf}
    known = kinds_of(sorted(stored.names()), family, hf)
    odd = sorted(stored.names() - known.keys())
    if is_sharded and odd:
        raise CheckpointError(f"{folder / CARRIED_INDEX} lists {shorten(odd)}, which this model has not; it is damaged")
    left = [re.compile(pattern) for pattern in allowed]
    unread = cache_scales(known) if quantisation_of(storage) else frozenset()
    names = [name for name in known if not any(one.fullmatch(_plain_name(name)) for one in left) and name not in unread]
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(known[name], []).append(name)
    files = {stored.file_of(name): None for name in names} if isinstance(stored, HFFolder) else {}
    part = _Part(stored, names)
    return Carried(folder, part, {kind: tuple(found) for kind, found in kinds.items()}, storage, tuple(files))


def _storage_of(index: Path) -> dict[str, Any]:
    metadata = json.loads(index.read_text(encoding="utf-8")).get("metadata")  # `HFFolder` saw that it is an object
    storage = metadata.get("storage") if isinstance(metadata, dict) else None
    if not isinstance(storage, dict):
        raise CheckpointError(
            f"{index} has {storage!r} under metadata.storage where an object is needed (fields of config.json that say "
            "how the tensors are stored, {} where they are plain); without it their values mean nothing, convert the "
            "model again"
        )
    return storage


def places_in_layer(names: Iterable[str]) -> frozenset[str]:
    """What comes after the number of a layer, which is the same in a layer of multi-token prediction."""
    return frozenset(found[1] for name in names if (found := _IN_LAYER.search(name)))


def missing_warning(carried: Carried, family: ModelFamily, hf: HFConfig) -> str | None:
    """What to say where config.json speaks of layers that are not there; None where it does not, or they are."""
    if PREDICTION in carried.kinds or not family.carried_names(hf).get(PREDICTION):
        return None
    return (
        f"config.json speaks of {PREDICTION}, and {carried.folder} has no tensors of it, so neither has what was "
        "written: engines cannot decode speculatively with it"
    )


def carried_record(carried: Carried, *, is_older: bool) -> dict[str, Any]:
    """What a manifest says of them. `is_older`: the weights beside them were trained on since."""
    return {
        "carried": {kind: list(names) for kind, names in carried.kinds.items()},
        "carried_from": str(carried.folder) if carried.kinds else None,
        "carried_is_older": is_older and PREDICTION in carried.kinds,
    }


def write_carried_index(folder: Path, carried: Carried, weight_map: Mapping[str, str]) -> None:
    """Write into a sharded checkpoint which of its files has which carried tensor."""
    content = {"metadata": {"storage": dict(carried.storage)}, "weight_map": dict(weight_map)}
    (folder / CARRIED_INDEX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _plain_name(name: str) -> str:
    """Of the weight that a scale belongs to."""
    return _SCALES.sub("", name).replace(".input_scale", ".weight")
