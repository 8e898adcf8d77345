"""Where a family's parameters lie in a sharded checkpoint, without a model: the same table in a third file format.

Megatron names what it saves by its fused layers, stacks the experts of a layer along a leading axis, and keeps gate and
up apart. `tests/contracts/test_sharded_names.py` holds this page to what megatron says of a built model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.models.family import HFConfig, ModelFamily
from moerl.models.hf_folder import HFFolder, WeightSource
from moerl.models.quantised import plain_source
from moerl.models.rules import GateUp, Rule, Shape, Vocab, padded_vocab_size
from moerl.shards import Box, Shard, ShardReader, has_shards

WEIGHTS = "weights"
"""Names of a checkpoint's weights begin so."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one parameter, and where it lies in the tensor that the files know."""

    rule: Rule
    key: str
    shape: Box
    """Of the tensor in the files: experts first where it has them."""
    start: Box
    """In the parameter, unpadded."""
    size: Box

    @property
    def offset(self) -> Box:
        """In the tensor in the files."""
        return self.start if self.rule.expert is None else (self.rule.expert, *self.start)

    @property
    def extent(self) -> Box:
        """`size` with the axis of experts."""
        return self.size if self.rule.expert is None else (1, *self.size)

    @property
    def name(self) -> str:
        """In the file that holds it."""
        return f"{self.key}@{','.join(map(str, self.offset))}"

    def cut(self, whole: Tensor) -> Tensor:
        """This box of the whole parameter, with as many axes as `shape`."""
        part = whole[tuple(slice(a, a + b) for a, b in zip(self.start, self.size, strict=True))]
        return part if self.rule.expert is None else part[None]


class ShardedNames:
    """The keys of one model's parameters."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """`rules` of the whole model."""
        self._moe_layers = {rule.layer for rule in rules if rule.is_expert}
        self._latent_layers = {rule.layer for rule in rules if ".linear_kv_up_proj." in rule.megatron_name}
        self._experts: dict[str, int] = {}
        for rule in rules:
            if rule.expert is not None:
                key = self.key(rule)
                self._experts[key] = max(self._experts.get(key, 0), rule.expert + 1)

    def key(self, rule: Rule) -> str:
        """The name in the files, without `weights/`."""
        name = rule.megatron_name
        if rule.is_expert:
            return name.replace(f".local_experts.{rule.expert}.", ".experts.", 1)
        if rule.layer in self._latent_layers:  # the norm before latent attention is fused nowhere, those inside it are
            for part in ("q", "kv"):
                name = name.replace(f".{part}_layernorm.", f".linear_{part}_up_proj.layer_norm_", 1)
        else:
            name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_", 1)
        if rule.layer not in self._moe_layers:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_", 1)
        return name

    def pieces(self, rule: Rule, rank: int = 0, size: int = 1) -> Iterator[Piece]:
        """What `rank` of `size` tensor-parallel ranks holds; of what is not sharded, each holds all.

        Raises:
            ConfigError: `size` does not divide the parameter.
        """
        key, shape = self.key(rule), rule.megatron_shape()
        whole = (self._experts[key], *shape) if rule.is_expert else shape
        for start, extent in _boxes(rule, shape, rank, size):
            if min(extent, default=1) > 0:
                yield Piece(rule, f"{WEIGHTS}/{key}", whole, start, extent)


def _boxes(rule: Rule, shape: Shape, rank: int, size: int) -> Iterator[tuple[Box, Box]]:
    axis = rule.tensor_axis
    if axis is None:
        yield (0,) * len(shape), shape
        return
    if isinstance(rule, Vocab):
        share = padded_vocab_size(shape[axis], rule.multiple, size) // size
        spans = [(min(rank * share, shape[axis]), max(0, min(share, shape[axis] - rank * share)))]
    else:
        rule.check_shares(size)
        block = shape[axis] // rule.num_blocks
        spans = [(i * block + rank * block // size, block // size) for i in range(rule.num_blocks)]
    for first, count in spans:
        start, extent = [0] * len(shape), list(shape)
        start[axis], extent[axis] = first, count
        yield tuple(start), tuple(extent)


class ShardedFolder:
    """A `WeightSource`, under Hugging Face names, over the files of a sharded checkpoint; reads may be concurrent."""

    def __init__(self, folder: Path, rules: Iterable[Rule]) -> None:
        """Read what the files say, and hold it against the rules.

        Raises:
            CheckpointError: a damaged or missing file, a parameter that no family knows, or of which a part is missing.
        """
        self.folder = folder
        self.reader = ShardReader(folder)
        rules = list(rules)
        names = ShardedNames(rules)
        self._pieces: dict[str, list[Piece]] = {}
        self._places: dict[str, tuple[Rule, int]] = {}
        known = set()
        for rule in rules:
            pieces = list(names.pieces(rule))
            known.add(pieces[0].key)
            entry = self.reader.entries.get(pieces[0].key)
            if entry is None:
                continue
            self.reader.check([self._ghost(piece, entry.dtype) for piece in pieces])
            self._pieces[rule.megatron_name] = pieces
            self._places |= {name: (rule, i) for i, name in enumerate(rule.hf_names)}
        held = {key for key in self.reader.entries if key.startswith(f"{WEIGHTS}/")}
        self._spare = frozenset(held - known)
        self._last = threading.local()

    def names(self) -> frozenset[str]:
        """Hugging Face names; what belongs to none has its name in the files."""
        return frozenset(self._places) | self._spare

    def shape(self, name: str) -> Shape:
        """From the rules, which the files were held against."""
        rule, index = self._places[name]
        return rule.hf_shapes[index]

    def dtype(self, name: str) -> torch.dtype:
        """From the files' descriptions."""
        return self.reader.entries[self._pieces[self._places[name][0].megatron_name][0].key].dtype

    def get(self, name: str) -> Tensor:
        """One tensor; of gate and up, which lie apart, only the one that is asked for is read."""
        rule, index = self._places[name]
        pieces = self._pieces[rule.megatron_name]
        if isinstance(rule, GateUp):
            return self._read(pieces[index]).reshape(rule.hf_shapes[index])
        last = vars(self._last).get("found")
        if last is None or last[0] != rule.megatron_name:
            last = (rule.megatron_name, rule.to_hf(self.whole(rule)))
            self._last.found = last
        return last[1][name]

    def get_slice(self, name: str, expert: int, start: int, stop: int) -> Tensor:
        """Part of one tensor."""
        return self.get(name)[expert, start:stop]

    def whole(self, rule: Rule) -> Tensor:
        """A parameter as megatron has it, unsharded."""
        parts = [self._read(piece) for piece in self._pieces[rule.megatron_name]]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=(rule.tensor_axis or 0) + int(rule.is_expert))
        return joined[0] if rule.is_expert else joined

    def _read(self, piece: Piece) -> Tensor:
        return self.reader.read(piece.key, piece.offset, piece.extent)

    @staticmethod
    def _ghost(piece: Piece, dtype: torch.dtype) -> Shard:
        return Shard(piece.key, piece.shape, piece.offset, torch.empty(piece.extent, dtype=dtype, device="meta"))


def open_weights(folder: Path, family: ModelFamily, hf: HFConfig, *, shards: Path | None = None) -> WeightSource:
    """The weights of a folder under Hugging Face names, whether they lie there as safetensors or as megatron's shards.

    Quantised ones are shown as plain ones (`moerl.models.quantised`).

    `shards`: where the shards lie, where that is another folder; the weights in `folder` are then never meant.

    Raises:
        CheckpointError: no weights, damaged ones, or quantised ones without their scales.
    """
    wanted, shards = shards, folder if shards is None else shards
    if has_shards(shards):
        return ShardedFolder(shards, family.weight_rules(hf))
    if wanted is not None and wanted != folder:  # `folder` has the model that a run began from, not what it learned
        raise CheckpointError(f"{wanted} holds no rank_00000.json, so the checkpoint is incomplete; use another one")
    return plain_source(HFFolder(folder), hf)
