"""Which box of which whole tensor every local tensor is, as megatron-core's ShardedTensor describes it.

Names, shapes and offsets come from the model's own `sharded_state_dict`; what belongs to a parameter (moments, main
weights, a reference) lies as the parameter does. A flat range of a parameter, which is what a rank of the distributed
optimizer holds, is cut into boxes here.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.mcore.model import unwrap
from moerl.mcore.parallel import ParallelState
from moerl.shards import Box, Shard


@dataclass(frozen=True)
class _Piece:
    """A box of a local tensor that is one box of a whole tensor."""

    name: str
    local: Box
    """Offset in the local tensor."""
    size: Box
    """Of the local box."""
    shape: Box
    """Of the whole tensor."""
    offset: Box
    """In the whole tensor."""
    num_leading: int
    """Axes that the whole tensor has before the local one's (experts)."""

    def shard(self, prefix: str, data: Tensor, start: Box) -> Shard:
        """`data` is the box at `start` (offset in the local tensor), inside this piece."""
        moved = [a - b for a, b in zip(start, self.local, strict=True)]
        offset = tuple(a + b for a, b in zip(self.offset, [0] * self.num_leading + moved, strict=True))
        return Shard(f"{prefix}/{self.name}", self.shape, offset, data[(None,) * self.num_leading])


class Placement:
    """Where one local tensor lies."""

    def __init__(self, pieces: Sequence[_Piece], shape: Box, *, is_writer: bool, is_original: bool) -> None:
        """`shape` is the local tensor's.

        Args:
            pieces: of the local tensor; rows that fill up the vocabulary are in none.
            shape: of the local tensor.
            is_writer: whether, of the ranks with the same box, this one writes it.
            is_original: False for a copy of another rank's tensor on this rank (tensor parallelism, tied embeddings).
        """
        self._pieces = pieces
        self._shape = shape
        self.is_writer = is_writer
        self.is_original = is_original

    @property
    def has_filling(self) -> bool:
        """Whether the local tensor has rows that are part of no whole tensor; they are 0."""
        return sum(math.prod(piece.size) for piece in self._pieces) < math.prod(self._shape)

    def shards(self, prefix: str, local: Tensor) -> list[Shard]:
        """Views of `local`, which has the shape of the local tensor."""
        return [piece.shard(prefix, _window(local, piece.local, piece.size), piece.local) for piece in self._pieces]

    def flat_shards(self, prefix: str, flat: Tensor, start: int) -> list[Shard]:
        """Views of `flat` [n], which is elements `start` to `start + n` of the flattened local tensor."""
        found = []
        for offset, size in flat_boxes(self._shape, start, start + flat.numel()):
            first = sum(a * b for a, b in zip(offset, _strides(self._shape), strict=True)) - start
            box = flat[first : first + math.prod(size)].view(size)
            for piece in self._pieces:
                low = tuple(map(max, offset, piece.local))
                high = tuple(map(min, _sum(offset, size), _sum(piece.local, piece.size)))
                extent = tuple(b - a for a, b in zip(low, high, strict=True))
                if min(extent) > 0:
                    inside = tuple(a - b for a, b in zip(low, offset, strict=True))
                    found.append(piece.shard(prefix, _window(box, inside, extent), low))
        return found


def placements(chunks: Sequence[torch.nn.Module], parallel: ParallelState) -> dict[int, Placement]:
    """`id` of every parameter and saved buffer of `chunks` -> its placement.

    Raises:
        CheckpointError: a module has state that is no tensor (it would need a pickle).
    """
    found = {}
    for model in map(unwrap, chunks):
        described = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for entry in described.values():
            if not isinstance(entry, ShardedObject):
                found[id(entry.data)] = _placement(entry, parallel, model.true_vocab_size)
            elif not _is_empty(entry.data):
                raise CheckpointError(f"{entry.key} is no tensor, and what only a pickle could hold is not saved here")
    return found


def _placement(entry: Any, parallel: ParallelState, vocab_size: int) -> Placement:
    tensor: Tensor = entry.data
    stage, copy, replica = entry.replica_id
    is_expert = not getattr(tensor, "allreduce", True)
    num_replicas = parallel.expert_dp_size if is_expert else parallel.dp_cp.size
    pieces = [_piece(part, tensor, vocab_size) for part in _parts(entry)]
    # Ranks with the same boxes take turns, so that each writes its share.
    turn = zlib.crc32(f"{entry.key}{pieces[0].offset}".encode()) % num_replicas
    is_original = stage == copy == 0
    return Placement(
        [piece for piece in pieces if min(piece.size) > 0],
        tuple(tensor.shape),
        is_writer=is_original and replica == turn,
        is_original=is_original,
    )


def _parts(entry: Any) -> list[ShardedTensor]:
    """Gate and up are one local tensor and two boxes of the whole one: megatron describes them by a factory.

    Built on a tensor without memory, whose views still know their place.
    """
    ghost = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    if not isinstance(entry, ShardedTensorFactory):
        return [entry.without_data()]
    built: Any = entry.build_fn(entry.key, ghost, entry.replica_id, None)
    return list(built)


def _piece(part: ShardedTensor, tensor: Tensor, vocab_size: int) -> _Piece:
    leading = part.prepend_axis_num
    place = 0 if part.data is None else int(part.data.storage_offset())
    local = []
    for stride in _strides(tuple(tensor.shape)):
        local.append(place // stride)
        place %= stride
    shape, size = list(part.global_shape), list(part.local_shape)
    if part.allow_shape_mismatch:  # the vocabulary, filled up to a multiple that depends on the layout
        shape[leading] = min(shape[leading], vocab_size)
        size[0] = max(0, min(size[0], vocab_size - part.global_offset[leading]))
    return _Piece(part.key, tuple(local), tuple(size), tuple(shape), tuple(part.global_offset), leading)


def _is_empty(state: Any) -> bool:
    """TransformerEngine has such state beside every linear layer; without FP8 there is nothing in it."""
    if isinstance(state, io.BytesIO):
        return not state.getbuffer().nbytes
    return state is None or (isinstance(state, Tensor) and not state.numel())


def flat_boxes(shape: Box, start: int, stop: int) -> Iterator[tuple[Box, Box]]:
    """(offset, size) of the boxes that elements `start` to `stop` of the flattened tensor make; at most 2 n - 1."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start % row:
        yield from _in_row(shape, first - 1, start % row, row)
    if last > first:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    if stop % row:
        yield from _in_row(shape, last, 0, stop % row)


def _in_row(shape: Box, row: int, start: int, stop: int) -> Iterator[tuple[Box, Box]]:
    for offset, size in flat_boxes(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def _sum(a: Box, b: Box) -> Box:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _strides(shape: Box) -> Box:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _window(tensor: Tensor, offset: Box, size: Box) -> Tensor:
    return tensor[tuple(slice(a, a + b) for a, b in zip(offset, size, strict=True))]
