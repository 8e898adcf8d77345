"""Hugging Face folders: config.json and safetensors, read lazily tensor by tensor and written in shards, atomically."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moerl.errors import CheckpointError, DataError
from moerl.models.family import FusedSlice, HFConfig, ModelFamily
from moerl.models.rules import Rule, Shape, check_shape, shorten
from moerl.tensor_file import TensorFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTISATION_FIELDS = ("quantization_config", "compression_config")
"""Of config.json: how weights are stored."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where older versions of nvidia-modelopt, and they alone, say how the weights beside it are quantised."""
SAID_BY = "said_by"
"""Of a `quantization_config` that another file than config.json says: its name."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of `config.json`; `quantization_config` of modelopt's own file where only that has it.

    Raises:
        DataError: no such folder or file, or not a JSON object.
    """
    path, modelopt = Path(folder) / "config.json", Path(folder) / MODELOPT_FILE
    if not path.is_file():
        raise DataError(f"{path} does not exist; model.path must be a Hugging Face folder with a config.json")
    config = _read_json(path)
    if any(config.get(name) for name in QUANTISATION_FIELDS) or not modelopt.is_file():
        return config
    said = _read_json(modelopt).get("quantization")
    said = said if isinstance(said, dict) else {}
    return {**config, "quantization_config": {**said, "quant_method": "modelopt", SAID_BY: MODELOPT_FILE}}


class WeightSource(Protocol):
    """Named tensors that are read one at a time."""

    def names(self) -> frozenset[str]:
        """Every name there is."""
        ...

    def shape(self, name: str) -> Shape:
        """Shape of a tensor, without reading it where that is possible."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Type of what `get` gives, without reading it."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU, as stored."""
        ...

    def get_slice(self, name: str, expert: int, start: int, stop: int) -> Tensor:
        """`tensor[expert, start:stop]` of a tensor [e, rows, columns], reading no more than that."""
        ...


class HFFolder:
    """The weights of a folder: `model.safetensors`, or shards with their index. They stay open."""

    def __init__(self, folder: str | Path, *, index_file: str = INDEX_FILE) -> None:
        """Open every file and check it against the index.

        Raises:
            CheckpointError: no weights, a missing or damaged file, a tensor that the index lists and its file lacks or
                that a file has and the index does not list there, or a single file beside shards.
        """
        self.folder = Path(folder)
        self._files: dict[Path, TensorFile] = {}
        self._places: dict[str, Path] = {}
        index, single = self.folder / index_file, self.folder / SINGLE_FILE
        if index.is_file():
            self._read_index(index)
            return
        if not single.is_file():
            raise CheckpointError(
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; download or export the weights there, "
                "or set model.init to random"
            )
        self._places = dict.fromkeys(self._open(single).names(), single)

    def names(self) -> frozenset[str]:
        """Every tensor name."""
        return frozenset(self._places)

    def shape(self, name: str) -> Shape:
        """From the file's header."""
        return self._files[self._place(name)].describe(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """From the file's header."""
        return self._files[self._place(name)].describe(name).dtype

    def get(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: no such tensor.
        """
        return self._files[self._place(name)].read(name)

    def get_slice(self, name: str, expert: int, start: int, stop: int) -> Tensor:
        """Read part of one tensor.

        Raises:
            CheckpointError: no such tensor.
        """
        file = self._files[self._place(name)]
        rest = file.describe(name).shape[2:]
        return file.read_box(name, (expert, start, *(0 for _ in rest)), (1, stop - start, *rest))[0]

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises:
            CheckpointError: no such tensor.
        """
        return self._place(name)

    def _place(self, name: str) -> Path:
        if name not in self._places:
            raise CheckpointError(
                f"tensor {name!r} is not in {self.folder}; the folder holds another model, or part of one"
            )
        return self._places[name]

    def _read_index(self, index: Path) -> None:
        weight_map = _weight_map(index)
        missing = sorted({file for file in weight_map.values() if not (self.folder / file).is_file()})
        if missing:
            raise CheckpointError(
                f"{index} lists {shorten(missing)}, which {self.folder} lacks; download the missing files"
            )
        if (
            index.name == INDEX_FILE
            and (self.folder / SINGLE_FILE).is_file()
            and SINGLE_FILE not in weight_map.values()
        ):
            raise CheckpointError(
                f"{self.folder} has two models: {SINGLE_FILE}, and the shards of {INDEX_FILE}, which does not list it; "
                f"other readers take the single file. Remove {SINGLE_FILE}, or {INDEX_FILE} with its shards, whichever "
                "is not the model you mean"
            )
        for file in sorted(set(weight_map.values())):
            listed = {name for name, place in weight_map.items() if place == file}
            held = set(self._open(self.folder / file).names())
            lacking, unlisted = sorted(listed - held), sorted(held - listed)
            if lacking:
                raise CheckpointError(f"{self.folder / file} lacks {shorten(lacking)}, which {index.name} says it has")
            if unlisted:
                raise CheckpointError(
                    f"{self.folder / file} holds {shorten(unlisted)}, which {index.name} does not list there; other "
                    "readers would load what is left out here. Download the index and its shards anew, or list the "
                    "tensors in its weight_map"
                )
        self._places = {name: self.folder / file for name, file in weight_map.items()}

    def _open(self, path: Path) -> TensorFile:
        self._files[path] = TensorFile(path)
        return self._files[path]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> name of its file."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; write the index again or download it anew")
    odd = sorted(name for name, file in weight_map.items() if not isinstance(file, str))
    if odd:
        raise CheckpointError(
            f"{index}: weight_map has no file name for {shorten(odd)}; write the index again or download it anew"
        )
    return weight_map


def weight_files(folder: Path) -> list[Path]:
    """The files that `HFFolder` reads, where there are weights; others may lie beside them.

    Raises:
        CheckpointError: an index without names of files.
        DataError: one that is not JSON.
    """
    index = folder / INDEX_FILE
    names = set(_weight_map(index).values()) if index.is_file() else {SINGLE_FILE}
    return [folder / name for name in sorted(names)]


def has_weights(folder: Path) -> bool:
    """Whether `HFFolder` would find any."""
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


class InMemory:
    """A `WeightSource` over tensors at hand, such as a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` is kept, not copied."""
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        """Every tensor name."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> Shape:
        """Shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._tensors[name].dtype

    def get(self, name: str) -> Tensor:
        """The tensor itself."""
        return self._tensors[name]

    def get_slice(self, name: str, expert: int, start: int, stop: int) -> Tensor:
        """A view."""
        return self._tensors[name][expert, start:stop]


class Unfused:
    """A `WeightSource` that shows per-expert names where the underlying one holds fused tensors, layer by layer.

    Which tensors may be fused, and how, is the family's to say (`fused_slices`): shapes alone do not tell.
    """

    def __init__(self, source: WeightSource, slices: Mapping[str, FusedSlice]) -> None:
        """`slices` maps every per-expert name to its place.

        Raises:
            CheckpointError: a fused tensor has another shape than its slices imply.
        """
        self._source = source
        stored = source.names()
        self._slices = {name: place for name, place in slices.items() if place.name in stored and name not in stored}
        fused = {place.name for place in self._slices.values()}
        self._names = frozenset((stored - fused) | self._slices.keys())
        self._check_fused()

    def names(self) -> frozenset[str]:
        """Names as on disk."""
        return self._names

    def shape(self, name: str) -> Shape:
        """Shape of a tensor."""
        place = self._slices.get(name)
        if place is None or place.expert is None:
            return self._source.shape(name if place is None else place.name)
        return (place.stop - place.start, *self._source.shape(place.name)[2:])

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        place = self._slices.get(name)
        return self._source.dtype(name if place is None else place.name)

    def get(self, name: str) -> Tensor:
        """One tensor; of a fused one only the part that is needed is read."""
        place = self._slices.get(name)
        if place is None or place.expert is None:
            return self._source.get(name if place is None else place.name)
        return self._source.get_slice(place.name, place.expert, place.start, place.stop)

    def get_slice(self, name: str, expert: int, start: int, stop: int) -> Tensor:
        """Part of one tensor."""
        return self.get(name)[expert, start:stop]

    def _check_fused(self) -> None:
        expected: dict[str, Shape] = {}
        for place in self._slices.values():
            if place.expert is None:
                continue
            experts, rows = expected.get(place.name, (0, 0))
            expected[place.name] = (max(experts, place.expert + 1), max(rows, place.stop))
        for name, sizes in expected.items():
            shape = self._source.shape(name)
            if len(shape) not in (2, 3) or shape[:2] != sizes:
                raise CheckpointError(
                    f"fused tensor {name!r} has shape {list(shape)} where config.json implies {[*sizes, '*']}; "
                    "the weights belong to another configuration"
                )


def check_names(source: WeightSource, rules: Iterable[Rule], ignored: Iterable[str] = ()) -> None:
    """Check that the rules read every tensor of `source` and find all they need; `ignored`: regular expressions.

    Raises:
        CheckpointError: unfilled parameters (with the tensors they miss) or unmapped tensors, named.
    """
    rules = list(rules)
    stored = source.names()
    unfilled = [
        f"{rule.megatron_name} (needs {name})" for rule in rules for name in rule.hf_names if name not in stored
    ]
    if unfilled:
        raise CheckpointError(
            f"unfilled parameters: {shorten(unfilled)}; the checkpoint is incomplete or of another model"
        )
    patterns = [re.compile(pattern) for pattern in ignored]
    spare = sorted(stored - {name for rule in rules for name in rule.hf_names})
    unmapped = [name for name in spare if not any(pattern.fullmatch(name) for pattern in patterns)]
    if unmapped:
        raise CheckpointError(
            f"unmapped tensors: {shorten(unmapped)}; the checkpoint holds more than config.json implies"
        )


def checked_source(
    source: WeightSource, family: ModelFamily, hf: HFConfig, allowed: Iterable[str] = ()
) -> WeightSource:
    """`source` under on-disk names, once it is sure that the family reads all of it and lacks nothing.

    `allowed`: regular expressions of names that may be left out, beside those that the family carries or has twice.

    Raises:
        CheckpointError: as `Unfused` and `check_names`, a tensor of another shape than config.json implies, or a copy
            of one that is not its original.
    """
    unfused, rules, allowed = Unfused(source, family.fused_slices(hf)), family.weight_rules(hf), tuple(allowed)
    carried = (pattern for patterns in family.carried_names(hf).values() for pattern in patterns)
    repeated = family.repeated_names(hf)
    check_names(unfused, rules, (*map(re.escape, repeated), *carried, *allowed))
    for rule in rules:
        for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True):
            check_shape(name, unfused.shape(name), shape)
    check_repeated(unfused, kept_repeats(repeated, allowed))
    return unfused


def kept_repeats(repeated: Mapping[str, str], allowed: Iterable[str]) -> dict[str, str]:
    """Those of `ModelFamily.repeated_names` that none of the regular expressions `allowed` leaves out."""
    patterns = [re.compile(pattern) for pattern in allowed]
    return {
        name: original
        for name, original in repeated.items()
        if not any(pattern.fullmatch(name) for pattern in patterns)
    }


def check_repeated(source: WeightSource, repeated: Mapping[str, str]) -> None:
    """Whether every copy that `source` has is its original, bit for bit.

    Raises:
        CheckpointError: one is not; names both.
    """
    for name in sorted(repeated.keys() & source.names()):
        original = repeated[name]
        told = _repeat_differs(source, name, original)
        if told is not None:
            raise CheckpointError(
                f"config.json says that {name} and {original} are one tensor (tie_word_embeddings), but {told}; set "
                f"tie_word_embeddings to false to keep both, or take {name} out of the files if the model has one"
            )


def _repeat_differs(source: WeightSource, name: str, original: str) -> str | None:
    kinds = [(source.dtype(one), tuple(source.shape(one))) for one in (name, original)]
    if kinds[0] != kinds[1]:
        first, second = (f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in kinds)
        return f"the files hold {first} and {second}"
    a, b = (source.get(one).contiguous().reshape(-1) for one in (name, original))
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    return f"{int((a != b).sum())} of their {a.numel()} values differ"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); write or download it again") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__} where a JSON object is needed")
    return value
