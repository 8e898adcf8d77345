"""How an export writes carried tensors: in the form of the folder, and within it as the decoder's own tensors are.

A layer of multi-token prediction is a layer of the decoder and a few tensors more, so what is a router in it, and what
FP8 folders quantise of it, follows from what comes after the number of a layer in the decoder's names. Where a folder
with FP8 blocks comes from one, its convention is the original's: everything stays as it is stored, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.convert.fp8_folders import SCALE
from moerl.convert.precision import asked_dtype, keeps_dtype
from moerl.models.carried import Carried, places_in_layer
from moerl.models.family import ROTARY
from moerl.models.fp8 import BLOCK, scale_shape
from moerl.models.quantised import quantisation_of
from moerl.models.rules import Rule
from moerl.tensor_file import Described


@dataclass(frozen=True)
class CarriedOut:
    """What is written of carried tensors."""

    tensors: Sequence[Described]
    """In order; without the scales of `quantised`."""
    get: Callable[[str], Tensor]
    quantised: frozenset[str]
    """Names of those in `tensors` that are to become FP8 blocks."""
    followers: frozenset[str]
    """Names of scales in `tensors`, each after its weight."""


def carried_out(
    carried: Carried, rules: Sequence[Rule], dtype: torch.dtype | None, linear: frozenset[str]
) -> CarriedOut:
    """For a folder whose rules' tensors are plain in `dtype` (None: as they are) but for `linear`, in FP8 blocks.

    Raises:
        CheckpointError: carried tensors without their scales.
    """
    if linear and _has_blocks(carried):
        stored = [Described(name, carried.stored.dtype(name), carried.stored.shape(name)) for name in carried.names]
        scales = frozenset(name for name in carried.names if name.endswith(SCALE))
        return CarriedOut(stored, carried.stored.get, frozenset(), scales)
    plain = carried.plain()
    names = sorted(plain.names())
    kept = kept_names(rules, carried)
    tensors = [
        Described(name, asked_dtype(plain.dtype(name), None if name in kept else dtype), plain.shape(name))
        for name in names
    ]
    places = places_in_layer(linear)
    quantised = {one.name for one in tensors if len(one.shape) == 2 and places_in_layer([one.name]) & places}
    return CarriedOut(tensors, plain.get, frozenset(quantised), frozenset())


def kept_names(rules: Iterable[Rule], carried: Carried) -> frozenset[str]:
    """Those that keep their type in an export: routers and their biases, carried ones too, and tables."""
    own = frozenset(name for rule in rules if keeps_dtype(rule) for name in rule.hf_names)
    places = places_in_layer(own)
    found = (name for name in carried.plain().names() if places_in_layer([name]) & places)
    return own | frozenset(found) | frozenset(carried.kinds.get(ROTARY, ()))


def _has_blocks(carried: Carried) -> bool:
    """Whether they are stored as `--dtype fp8-block` writes: FP8 blocks of its size with float32 scales."""
    settings, stored = quantisation_of(carried.storage) or {}, carried.stored
    if settings.get("quant_method") != "fp8" or list(settings.get("weight_block_size") or ()) != list(BLOCK):
        return False
    carried.plain()  # each scale has its weight, and each weight its scale
    for name in stored.names():
        if stored.dtype(name) is not torch.float8_e4m3fn:
            continue
        scale, shape = name + SCALE, stored.shape(name)
        if len(shape) != 2 or scale not in stored.names() or stored.dtype(scale) is not torch.float32:
            return False
        if stored.shape(scale) != scale_shape(*shape):
            return False
    return True
