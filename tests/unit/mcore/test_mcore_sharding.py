"""A flat range of a tensor, as the distributed optimizer holds it, is cut into boxes of the whole tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(st.data())
def test_the_boxes_are_the_range_in_order(data):
    from moerl.mcore.sharding import flat_boxes

    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    size = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    whole = torch.arange(size).view(shape)
    boxes = list(flat_boxes(shape, start, stop))
    windows = [whole[tuple(slice(a, a + b) for a, b in zip(offset, extent, strict=True))] for offset, extent in boxes]
    flat = torch.cat([window.flatten() for window in windows]) if windows else torch.empty(0, dtype=torch.int64)
    assert torch.equal(flat, torch.arange(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1
    assert all(tuple(window.shape) == extent for window, (_, extent) in zip(windows, boxes, strict=True))


def test_ranks_of_the_distributed_optimizer_hold_gate_and_up_and_drop_the_filling():
    """[gate; up] of 2 x 3 rows, of which the checkpoint knows two boxes; and a vocabulary of 5 filled up to 6 rows."""
    from moerl.mcore.sharding import Placement, _Piece

    gate = _Piece("fc1", (0, 0), (3, 4), (12, 4), (3, 0), 0)
    up = _Piece("fc1", (3, 0), (3, 4), (12, 4), (9, 0), 0)
    local = torch.arange(24.0).view(6, 4)
    place = Placement([gate, up], (6, 4), is_writer=True, is_original=True)
    assert not place.has_filling
    whole = torch.full((12, 4), torch.nan)
    for start, stop in ((0, 5), (5, 17), (17, 24)):
        for shard in place.flat_shards("p", local.flatten()[start:stop], start):
            assert shard.name == "p/fc1"
            row, column = shard.offset
            whole[row : row + shard.data.shape[0], column : column + shard.data.shape[1]] = shard.data
    assert torch.equal(whole[3:6], local[:3])
    assert torch.equal(whole[9:12], local[3:])
    assert int(whole.isnan().sum()) == 24
    rows = Placement([_Piece("word", (0, 0), (2, 4), (5, 4), (3, 0), 0)], (3, 4), is_writer=True, is_original=True)
    assert rows.has_filling
    shards = rows.flat_shards("p", torch.arange(12.0), 0)
    assert [(shard.offset, tuple(shard.data.shape)) for shard in shards] == [((3, 0), (2, 4))]
