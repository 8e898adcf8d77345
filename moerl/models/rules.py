"""Rules between Hugging Face tensors and Megatron parameters: one class per transform, each exactly invertible.

A rule ties one whole (unsharded) Megatron parameter to the Hugging Face tensors it is made of. The same object loads a
checkpoint (`to_megatron`, `shard`), saves one (`gather`, `to_hf`) and streams weights to engines: there is no second
table. Values are only moved, never computed, so every direction is bitwise and keeps the dtype. Weights are [out, in]
in both worlds.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moerl.errors import CheckpointError, ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """One Megatron parameter (local layer spec, global numbers) and the Hugging Face tensors it is made of."""

    megatron_name: str
    hf_names: tuple[str, ...]
    """In the order in which they are written."""
    hf_shapes: tuple[Shape, ...]
    """[i] is the shape of `hf_names[i]`."""
    tensor_axis: int | None = None
    """Dim of the Megatron parameter that tensor parallelism shards; None: every rank holds all of it."""
    layer: int | None = None
    """Global layer number, 0-based; None outside the layers."""
    expert: int | None = None
    """Global expert number; such a parameter is sharded by the expert-tensor axis and placed by the expert axis."""
    is_buffer: bool = False
    """No optimizer moves it, and it is float32 in every precision: in training, in files, on its way to engines."""

    num_blocks: ClassVar[int] = 1
    """Equal parts along `tensor_axis` that are sharded each on its own (gate and up: 2)."""

    @property
    def is_expert(self) -> bool:
        """True for parameters of routed experts."""
        return self.expert is not None

    # Shapes are arithmetic: joining tensors without memory would import torch's compiler, which takes seconds.

    @abstractmethod
    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Hugging Face tensors in the order of `hf_names` -> the whole parameter."""

    @abstractmethod
    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """Inverse of `join`; views of `whole` where the layout allows it."""

    def to_megatron(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The whole parameter from its Hugging Face tensors.

        Raises:
            CheckpointError: a tensor is missing or has another shape than config.json implies.
        """
        for name, shape in zip(self.hf_names, self.hf_shapes, strict=True):
            if name not in tensors:
                raise CheckpointError(f"tensor {name!r} is missing; parameter {self.megatron_name!r} cannot be filled")
            check_shape(name, tensors[name].shape, shape)
        return self.join([tensors[name] for name in self.hf_names])

    def to_hf(self, whole: Tensor) -> dict[str, Tensor]:
        """Hugging Face tensors, in the order of `hf_names`, from the whole parameter.

        Raises:
            CheckpointError: the parameter has the wrong shape.
        """
        check_shape(self.megatron_name, whole.shape, self.megatron_shape())
        return dict(zip(self.hf_names, self.split(whole), strict=True))

    def megatron_shape(self) -> Shape:
        """Shape of the whole parameter, without padding."""
        return self.hf_shapes[0]

    def shard_shape(self, size: int) -> Shape:
        """Shape of the parameter that each of `size` ranks holds, padding included."""
        return tuple(self.shard(torch.empty(self.megatron_shape(), device="meta"), 0, size).shape)

    def check_shares(self, size: int) -> None:
        """Whether `size` ranks can share the parameter along `tensor_axis`.

        Raises:
            ConfigError: `size` does not divide it.
        """
        axis = 0 if self.tensor_axis is None else self.tensor_axis
        length = self.megatron_shape()[axis] // self.num_blocks
        if length % size:
            raise ConfigError(
                f"{self.megatron_name}: {size} tensor-parallel ranks cannot share {self.num_blocks} x {length} rows "
                f"of dim {axis}; choose a parallel size that divides {length}"
            )

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The part of `rank` of `size`; a view where it is one piece. Without a `tensor_axis`: `whole`.

        Raises:
            ConfigError: `size` does not divide the parameter.
        """
        if self.tensor_axis is None or size == 1:
            return whole
        self.check_shares(size)
        length = whole.shape[self.tensor_axis] // self.num_blocks
        blocks = whole.chunk(self.num_blocks, dim=self.tensor_axis)
        pieces = [block.narrow(self.tensor_axis, rank * length // size, length // size) for block in blocks]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.tensor_axis)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """Inverse of `shard`: `shards[r]` is the part of rank r."""
        if self.tensor_axis is None or len(shards) == 1:
            return shards[0]
        parts = [shard.chunk(self.num_blocks, dim=self.tensor_axis) for shard in shards]
        ordered = [part[block] for block in range(self.num_blocks) for part in parts]
        return torch.cat(ordered, dim=self.tensor_axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Rule):
    """The same tensor in both worlds."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """As it is."""
        return tensors[0]

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """As it is."""
        return (whole,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transposed(Rule):
    """A matrix that is stored as [in, out]."""

    def megatron_shape(self) -> Shape:
        """[out, in]."""
        return self.hf_shapes[0][::-1]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """[in, out] -> [out, in]."""
        return tensors[0].t()

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """[out, in] -> [in, out]."""
        return (whole.t(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternatingGateUp(Rule):
    """Gate and up projections of which one tensor holds a column in turn, [in, 2 f]; of their biases [2 f].

    The parameter is as `GateUp` makes it: [gate; up], of which rank r holds [gate_r; up_r].
    """

    num_blocks: ClassVar[int] = 2

    def megatron_shape(self) -> Shape:
        """[2 f, in] or [2 f]."""
        return self.hf_shapes[0][::-1]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """[in, 2 f] -> [2 f, in], gate first; [2 f] -> [2 f]."""
        rows = tensors[0].movedim(-1, 0)
        return torch.cat([rows[0::2], rows[1::2]])

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """Inverse."""
        return (torch.stack(whole.chunk(2), dim=1).flatten(0, 1).movedim(0, -1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class QKV(Rule):
    """Query, key and value rows interleaved by query group: [q heads of the group, k, v] for each group in turn.

    Works for weights [rows, h] and biases [rows]. A contiguous slice of rows is what Megatron gives each rank, also
    where there are more ranks than groups (its attention then gathers the group back), so sharding is plain.
    """

    num_heads: int
    num_query_groups: int
    head_dim: int

    def megatron_shape(self) -> Shape:
        """The rows of all three."""
        return _stacked(self.hf_shapes)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """[q, k, v] -> [groups * (heads per group + 2) * d, ...]."""
        grouped = [tensor.unflatten(0, (self.num_query_groups, -1)) for tensor in tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """Rows of all groups -> q [heads * d, ...], k and v [groups * d, ...]."""
        grouped = whole.unflatten(0, (self.num_query_groups, -1))
        q_rows = self.num_heads // self.num_query_groups * self.head_dim
        parts = grouped.split([q_rows, self.head_dim, self.head_dim], dim=1)
        return tuple(part.flatten(0, 1) for part in parts)

    def check_shares(self, size: int) -> None:
        """Whole query groups per rank, or an equal part of one group.

        Raises:
            ConfigError: `size` does not divide the heads, or neither divides nor is a multiple of the groups.
        """
        groups = self.num_query_groups
        if (groups % size and size % groups) or self.num_heads % size:
            raise ConfigError(
                f"{self.megatron_name}: {size} tensor-parallel ranks cannot share {self.num_heads} heads in {groups} "
                "query groups; choose a size that divides the heads and divides, or is a multiple of, the groups"
            )
        super(QKV, self).check_shares(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateUp(Rule):
    """Gate and up projections stacked, gate first: rank r of a tensor-parallel group holds [gate_r; up_r]."""

    num_blocks: ClassVar[int] = 2

    def megatron_shape(self) -> Shape:
        """The rows of both."""
        return _stacked(self.hf_shapes)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """[gate; up] along dim 0."""
        return torch.cat(list(tensors), dim=0)

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """(gate, up)."""
        return whole.chunk(2, dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocab(Rule):
    """Embedding or output rows; each rank's share is padded with zero rows, and padding never leaves Megatron.

    A padded row has logit 0, not -inf: whoever normalises over the sharded vocabulary must stop at the true size.
    """

    multiple: int = 1
    """Each rank's rows are a multiple of this (`make_vocab_size_divisible_by`)."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """As it is, without padding."""
        return tensors[0]

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """As it is; `whole` has no padding."""
        return (whole,)

    def check_shares(self, size: int) -> None:
        """Filling rows make any size fit."""

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Pad for `size` ranks, then slice."""
        num_rows = whole.shape[0]
        padding = padded_vocab_size(num_rows, self.multiple, size) - num_rows
        if padding:
            whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])])
        return super(Vocab, self).shard(whole, rank, size)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the ranks' rows and drop the padding."""
        return super(Vocab, self).gather(shards)[: self.hf_shapes[0][0]]


def _stacked(shapes: Sequence[Shape]) -> Shape:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def padded_vocab_size(vocab_size: int, multiple: int, size: int) -> int:
    """Rows of the padded vocabulary over all `size` ranks; each rank's share is a multiple of `multiple`."""
    step = multiple * size
    return -(-vocab_size // step) * step


def check_shape(name: str, shape: Sequence[int], expected: Shape) -> None:
    """Compare the `shape` of the tensor `name`.

    Raises:
        CheckpointError: names the tensor, its shape and the expected one.
    """
    if tuple(shape) != expected:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(shape)} where config.json implies {list(expected)}; "
            "the weights belong to another configuration"
        )


_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def shift_indices(megatron_name: str, *, layers: int = 0, experts: int = 0) -> str:
    """Add to the layer and expert numbers in a name: a rank's own parameter name -> the global name of its rule."""
    name = _LAYER.sub(lambda found: f"{found[1]}layers.{int(found[2]) + layers}.", megatron_name, count=1)
    return _EXPERT.sub(lambda found: f".local_experts.{int(found[1]) + experts}.", name, count=1)


def match_parameters(rules: Iterable[Rule], names: Iterable[str], *, is_complete: bool = True) -> dict[str, Rule]:
    """Give every parameter (global names) its rule, in the order of `names`.

    With `is_complete` the parameters are those of the whole model, and a rule without a parameter is an error too; a
    rank that holds only some layers or experts says False.

    Raises:
        CheckpointError: unfilled parameters, or rules that fill nothing; names them.
    """
    by_name = {rule.megatron_name: rule for rule in rules}
    names = list(names)
    unfilled = [name for name in names if name not in by_name]
    if unfilled:
        raise CheckpointError(f"unfilled parameters: no rule of the family makes {shorten(unfilled)}")
    unused = sorted(by_name.keys() - set(names)) if is_complete else []
    if unused:
        raise CheckpointError(f"the model lacks parameters that the checkpoint has: {shorten(unused)}")
    return {name: by_name[name] for name in names}


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """The first few of `names` and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
