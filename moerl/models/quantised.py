"""Quantised checkpoints read as plain ones: weights under their own names, scales hidden, nothing guessed.

What a scale means is said by `quantization_config` of config.json and must fit its shape: [m, 1] is per channel only
where the configuration says so. Weights are dequantised before anything reshapes them, since rows that move while their
scales stay behind would be wrong without a sign.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.models.family import HFConfig
from moerl.models.fp8 import dequantise_fp8, scale_shape
from moerl.models.hf_folder import QUANTISATION_FIELDS, SAID_BY, WeightSource
from moerl.models.packed_formats import INT4_PER_WORD, MXFP4_GROUP, dequantise_int4, dequantise_mxfp4
from moerl.models.rules import Shape

METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp4")
_SCALES = ("_scale_inv", "_scale")
_INPUT_SCALE = ".input_scale"
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PLAIN_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_CACHE_SCALE = re.compile(r".*\bself_attn\.(([qkv]_proj\.)?[qkv]_scale|[qkv]_proj\.output_scale|(kv|prob)_scale)")
"""As modelopt, compressed-tensors and AutoFP8 have named them in turn."""

Kind = Literal["fp8", "mxfp4", "int4"]


@dataclass(frozen=True, slots=True)
class _Stored:
    """How one weight is stored."""

    kind: Kind
    weight: str
    scale: str
    shape: Shape
    """Of the weight as it is shown."""
    block: tuple[int, int] = (1, 1)
    grid: tuple[int, int] = (1, 1)
    """Scales of one matrix."""


class Dequantised:
    """A `WeightSource` over another one, with every quantised weight as `dtype` under its plain name.

    Scales of an engine's key-value cache are left out (`cache_scales`).

    gpt-oss stores MXFP4 experts as [E, out, in], and in its bf16 files and in memory as [E, in, out]. With
    `transposes_mxfp4` (the default) they are shown as the latter, so one set of rules reads both.
    """

    def __init__(
        self,
        source: WeightSource,
        settings: Mapping[str, Any],
        *,
        dtype: torch.dtype = torch.bfloat16,
        transposes_mxfp4: bool = True,
        is_part: bool = False,
    ) -> None:
        """`settings` is `quantization_config`; of the weights headers alone are read.

        4-bit integers have their shape in a tensor beside them, and those, two numbers each, are all read here.

        `is_part`: `source` is some of a folder's tensors, of which none need be quantised.

        Raises:
            CheckpointError: a float8 tensor without its scale, a scale without its weight or of a shape that fits
                nothing, or a method that is not supported; names the tensor, what was found and what is allowed.
        """
        self._source = source
        self._dtype = dtype
        self._transposes = transposes_mxfp4
        self._method = _method(settings)
        self._grids = _declared_blocks(settings, self._method)
        self._group_sizes = _group_sizes(settings) if self._method == "compressed-tensors" else []
        self._stored: dict[str, _Stored] = {}
        self._hidden: set[str] = set()
        names = source.names()
        for name in sorted(names):
            self._take(name, names)
        self._refuse_orphans(names)
        self._hidden |= cache_scales(names)
        if not self._stored and not is_part:
            said = f"remove {settings[SAID_BY]}" if SAID_BY in settings else "remove the field"
            raise CheckpointError(
                f"{_where(settings)} says {self._method!r}, but no tensor is quantised; {said}, or download the "
                "weights again"
            )

    def names(self) -> frozenset[str]:
        """Plain names."""
        return (self._source.names() - self._hidden) | self._stored.keys()

    def shape(self, name: str) -> Shape:
        """As it is shown."""
        return self._stored[name].shape if name in self._stored else self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """As it is shown."""
        return self._dtype if name in self._stored else self._source.dtype(name)

    def get(self, name: str) -> Tensor:
        """The whole tensor, dequantised."""
        place = self._stored.get(name)
        if place is None:
            return self._source.get(name)
        if len(place.shape) == 3:
            return torch.stack([self.get_slice(name, e, 0, place.shape[1]) for e in range(place.shape[0])])
        weight, scale = self._source.get(place.weight), self._source.get(place.scale)
        if place.kind == "int4":
            return dequantise_int4(weight, scale, place.shape[1], dtype=self._dtype)
        return dequantise_fp8(weight, scale.reshape(place.grid), place.block, dtype=self._dtype)

    def get_slice(self, name: str, expert: int, start: int, stop: int) -> Tensor:
        """`tensor[expert, start:stop]`: those rows and the scales of their blocks are read, nothing else.

        Of MXFP4 that is shown transposed, the expert is read, since its rows run through all of the stored ones.
        """
        place = self._stored.get(name)
        if place is None:
            return self._source.get_slice(name, expert, start, stop)
        if place.kind == "mxfp4":
            return self._mxfp4_slice(place, expert, start, stop)
        weight = self._source.get_slice(place.weight, expert, start, stop)
        first, last = start // place.block[0], -(-stop // place.block[0])
        if len(self._source.shape(place.scale)) == 3:
            scale = self._source.get_slice(place.scale, expert, first, last)
        else:  # one for each expert, or for each of its rows: few
            scale = self._source.get(place.scale).reshape(-1, *place.grid)[expert, first:last]
        return dequantise_fp8(weight, scale, place.block, dtype=self._dtype, first_row=start - first * place.block[0])

    def _mxfp4_slice(self, place: _Stored, expert: int, start: int, stop: int) -> Tensor:
        if not self._transposes:
            parts = (self._source.get_slice(name, expert, start, stop) for name in (place.weight, place.scale))
            return dequantise_mxfp4(*parts, dtype=self._dtype)
        rows = self._source.shape(place.weight)[1]
        first, last = start // MXFP4_GROUP, -(-stop // MXFP4_GROUP)
        parts = (
            self._source.get_slice(name, expert, 0, rows)[:, first:last].contiguous()
            for name in (place.weight, place.scale)
        )
        columns = slice(start - first * MXFP4_GROUP, stop - first * MXFP4_GROUP)
        return dequantise_mxfp4(*parts, dtype=self._dtype)[:, columns].T.contiguous()

    def _take(self, name: str, names: frozenset[str]) -> None:
        """Note `name` where it is the main tensor of a quantised weight."""
        if self._method == "mxfp4" and name.endswith("_blocks"):
            self._add(name.removesuffix("_blocks"), self._mxfp4(name, names))
        elif self._method == "compressed-tensors" and name.endswith(".weight_packed"):
            self._add(name.removesuffix("_packed"), self._int4(name, names))
        elif self._source.dtype(name) in _FLOAT8:
            self._add(name, self._fp8(name, names))

    def _add(self, name: str, place: _Stored) -> None:
        self._stored[name] = place
        self._hidden |= {place.weight, place.scale}

    def _fp8(self, name: str, names: frozenset[str]) -> _Stored:
        if self._source.dtype(name) is not torch.float8_e4m3fn or not self._grids:
            raise CheckpointError(
                f"tensor {name!r} is {self._source.dtype(name)} where quantization_config says {self._method!r}; "
                "only float8_e4m3fn of fp8, compressed-tensors and modelopt is read"
            )
        found = [name + ending for ending in _SCALES if name + ending in names]
        if len(found) != 1:
            raise CheckpointError(
                f"float8 tensor {name!r} has {found or 'no scale'}; it needs exactly one of "
                f"{' and '.join(name + ending for ending in _SCALES)}, without it its values mean nothing"
            )
        if name.endswith(".weight"):
            self._hidden |= names & {name.removesuffix(".weight") + _INPUT_SCALE}
        shape, scale = self._source.shape(name), self._source.shape(found[0])
        self._check_scale_dtype(found[0])
        if len(shape) not in (2, 3):
            raise CheckpointError(f"float8 tensor {name!r} has shape {list(shape)}; it must have 2 or 3 dims")
        rows, columns = shape[-2:]
        allowed: list[Shape] = []
        for declared in self._grids:
            block = (declared[0] or rows, declared[1] or columns)
            grid = scale_shape(rows, columns, block)
            fits: list[Shape] = [(*shape[:-2], *grid)]
            if grid[1] == 1 and declared[1] is None:
                fits.append((*shape[:-2], grid[0]))
            if grid == (1, 1) and declared == (None, None):
                fits += [shape[:-2]] + ([(1,)] if len(shape) == 2 else [])
            if scale in fits:
                return _Stored("fp8", name, found[0], shape, block, grid)
            allowed += fits
        raise CheckpointError(
            f"scale {found[0]!r} has shape {list(scale)}, which fits no layout that quantization_config declares for "
            f"{list(shape)} (allowed: {', '.join(str(list(one)) for one in allowed)})"
        )

    def _mxfp4(self, name: str, names: frozenset[str]) -> _Stored:
        scale = name.removesuffix("_blocks") + "_scales"
        shape = self._source.shape(name)
        if scale not in names:
            raise CheckpointError(f"MXFP4 tensor {name!r} has no scale; it needs {scale}")
        if len(shape) != 4 or shape[3] * 2 != MXFP4_GROUP or self._source.shape(scale) != shape[:3]:
            raise CheckpointError(
                f"{name!r} has shape {list(shape)} and {scale!r} {list(self._source.shape(scale))}; MXFP4 needs "
                "[e, rows, groups, 16] and [e, rows, groups]"
            )
        if {self._source.dtype(name), self._source.dtype(scale)} != {torch.uint8}:
            raise CheckpointError(f"{name!r} and {scale!r} must both be uint8 to be MXFP4")
        inner = (shape[1], shape[2] * MXFP4_GROUP)
        return _Stored("mxfp4", name, scale, (shape[0], *(reversed(inner) if self._transposes else inner)))

    def _int4(self, name: str, names: frozenset[str]) -> _Stored:
        base = name.removesuffix("_packed")
        scale, size = f"{base}_scale", f"{base}_shape"
        refused = sorted({f"{base}_zero_point", f"{base}_g_idx"} & names)
        if refused or not {scale, size} <= names:
            raise CheckpointError(
                f"packed tensor {name!r} needs {scale} and {size}, and only symmetric integers in their order are read "
                f"(found besides: {refused})"
            )
        self._check_scale_dtype(scale)
        rows, columns = (int(value) for value in self._source.get(size))
        groups = self._source.shape(scale)[-1]
        words = self._source.shape(name)
        fits = words == (rows, -(-columns // INT4_PER_WORD)) and self._source.shape(scale) == (rows, groups)
        if not fits or columns % groups or self._source.dtype(name) is not torch.int32:
            raise CheckpointError(
                f"{name!r} has shape {list(words)} and {scale!r} {list(self._source.shape(scale))}; 4-bit integers of "
                f"[{rows}, {columns}] need int32 [{rows}, {-(-columns // INT4_PER_WORD)}] and [{rows}, equal groups]"
            )
        wanted = {said: -(-columns // (said or columns)) for said in self._group_sizes}
        if groups not in wanted.values():
            told = " or ".join(f"{said or 'one for a row'} ({count} scales)" for said, count in wanted.items())
            raise CheckpointError(
                f"{scale!r} has {groups} scales for each row of {columns} values, but the group_size that "
                f"quantization_config has for 4-bit integers is {told or 'missing'}; copy config.json anew from the "
                "model's source, or download the weights again"
            )
        self._hidden.add(size)
        return _Stored("int4", name, scale, (rows, columns))

    def _check_scale_dtype(self, name: str) -> None:
        if self._source.dtype(name) not in _SCALE_DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SCALE_DTYPES)
            raise CheckpointError(f"scale {name!r} is {self._source.dtype(name)}; allowed: {allowed}")

    def _refuse_orphans(self, names: frozenset[str]) -> None:
        endings = ("_scale_inv", ".weight_scale", "_blocks", "_scales", ".weight_packed", _INPUT_SCALE)
        orphans = [name for name in sorted(names - self._hidden) if name.endswith(endings)]
        if orphans:
            raise CheckpointError(
                f"scale {orphans[0]!r} has no quantised weight (one of {len(orphans)}); the weights were cast or are "
                "incomplete, download them again"
            )


def cache_scales(names: Iterable[str]) -> frozenset[str]:
    """Names of scales of what an engine computes in attention and keeps in its cache; of weights they say nothing."""
    return frozenset(name for name in names if _CACHE_SCALE.fullmatch(name))


def quantisation_of(hf: HFConfig) -> Mapping[str, Any] | None:
    """What config.json says of how weights are stored; None where they are plain.

    Raises:
        CheckpointError: it is no JSON object.
    """
    found = {field: hf[field] for field in QUANTISATION_FIELDS if hf.get(field)}
    for field, settings in found.items():
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"config.json: {field} is {settings!r}; a JSON object is needed")
        return settings
    return None


def plain_source(source: WeightSource, hf: HFConfig, *, is_part: bool = False) -> WeightSource:
    """`source` itself where nothing is quantised, else dequantised to the type that config.json names, or bfloat16.

    One folder stands for one plain model, whoever reads it: asking for float32 later widens the same values.
    `is_part` as in `Dequantised`.

    Raises:
        CheckpointError: as `Dequantised`, or float8 tensors without a `quantization_config`.
    """
    settings = quantisation_of(hf)
    if settings is not None:
        word = str(hf.get("dtype") or hf.get("torch_dtype") or "").removeprefix("torch.")
        return Dequantised(source, settings, dtype=_PLAIN_DTYPES.get(word, torch.bfloat16), is_part=is_part)
    bare = next((name for name in sorted(source.names()) if source.dtype(name) in _FLOAT8), None)
    if bare is not None:
        raise CheckpointError(
            f"tensor {bare!r} is {source.dtype(bare)}, but config.json has no quantization_config to say what its "
            "scale is; copy config.json anew from the model's source"
        )
    return source


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json for weights that are written plain."""
    return {name: value for name, value in config.items() if name not in QUANTISATION_FIELDS}


def _method(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(
            f"config.json: quantization_config has quant_method {method!r}, which is not supported (allowed: "
            f"{', '.join(METHODS)})"
        )
    if method == "modelopt" and settings.get("quant_algo") != "FP8":
        raise CheckpointError(
            f"{_where(settings)} has quant_algo {settings.get('quant_algo')!r}; of modelopt only 'FP8' (per tensor) is "
            "read; use the model's unquantised folder, or one in FP8"
        )
    return str(method)


def _where(settings: Mapping[str, Any]) -> str:
    return settings.get(SAID_BY) or "config.json: quantization_config"


def _declared_blocks(settings: Mapping[str, Any], method: str) -> list[tuple[int | None, int | None]]:
    """Blocks that scales of float8 weights may have; None: as long as the weight. One per tensor always may."""
    whole: tuple[None, None] = (None, None)
    if method == "mxfp4":
        return []
    if method == "fp8":
        size = settings.get("weight_block_size")
        return [whole] if size is None else [_block(size), whole]
    if method == "modelopt":
        return [whole]
    blocks: list[tuple[int | None, int | None]] = []
    for weights in _weights_of_groups(settings):
        strategy = weights.get("strategy")
        if weights.get("type") == "int" and (weights.get("num_bits") != 4 or not weights.get("symmetric", True)):
            raise CheckpointError(
                f"config.json: quantization_config has weights {weights}; of integers only symmetric 4-bit are read"
            )
        if strategy == "channel":
            blocks.append((1, None))
        elif strategy == "block":
            blocks.append(_block(weights.get("block_structure")))
        elif strategy not in ("tensor", "group"):
            raise CheckpointError(
                f"config.json: quantization_config has strategy {strategy!r} (allowed: tensor, channel, block, and "
                "group for integers)"
            )
    return [*blocks, whole]


def _weights_of_groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each kind of layer."""
    groups = settings.get("config_groups") or {}
    held = list(groups.values()) if isinstance(groups, Mapping) else [None]
    found = [(group.get("weights") or {}) if isinstance(group, Mapping) else None for group in held]
    if not all(isinstance(weights, Mapping) for weights in found):
        raise CheckpointError(
            f"config.json: quantization_config has config_groups {groups!r}; a JSON object is needed, whose values are "
            "JSON objects, as is 'weights' in each"
        )
    return [weights for weights in found if weights is not None]


def _group_sizes(settings: Mapping[str, Any]) -> list[int | None]:
    """Values of a row of 4-bit integers that share a scale, as config.json says of each kind of layer; None: all."""
    found: list[int | None] = []
    for weights in _weights_of_groups(settings):
        if weights.get("type") != "int":
            continue
        size = weights.get("group_size")
        if weights.get("strategy") == "group" and (type(size) is not int or size < 1):
            raise CheckpointError(
                f"config.json: quantization_config has group_size {size!r} with strategy 'group'; a positive integer "
                "is needed"
            )
        found.append(size if weights.get("strategy") == "group" else None)
    return found


def _block(size: Any) -> tuple[int, int]:
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(f"config.json: quantization_config has block size {size!r}; two positive integers needed")
    return size[0], size[1]
