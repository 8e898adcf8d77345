"""Files of sharded tensors: any cut is read under any other, and what does not cover a tensor is refused."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.errors import CheckpointError
from moerl.shards import Shard, ShardReader, files_of, write_rank

STATE = {"layout": {}, "counters": {}}


def cuts(length, pieces):
    bounds = np.linspace(0, length, pieces + 1).astype(int)
    return list(itertools.pairwise(bounds.tolist()))


def boxes(shape, pieces):
    """(offset, size) of a grid of boxes."""
    for corners in itertools.product(*(cuts(length, n) for length, n in zip(shape, pieces, strict=True))):
        yield tuple(low for low, _ in corners), tuple(high - low for low, high in corners)


def window(tensor, offset, size):
    return tensor[tuple(slice(a, a + b) for a, b in zip(offset, size, strict=True))]


def write(folder, whole, pieces, world=3):
    """Every rank some boxes of every tensor."""
    parts = [
        Shard(name, tuple(tensor.shape), offset, window(tensor, offset, size).clone())
        for name, tensor in whole.items()
        for offset, size in boxes(tensor.shape, pieces[: tensor.ndim])
    ]
    for rank in range(world):
        write_rank(folder, rank, parts[rank::world], {"world_size": world, **STATE}, {"rng": torch.tensor([rank])})


@pytest.fixture
def whole():
    torch.manual_seed(0)
    return {"a/x": torch.randn(7, 10), "b": torch.randn(9).bfloat16(), "experts": torch.randn(6, 4, 5)}


@pytest.mark.parametrize("written", [(1, 1, 1), (2, 3, 1), (6, 2, 2), (3, 4, 5)])
@pytest.mark.parametrize("read", [(1, 1, 1), (3, 2, 2), (6, 1, 5)])
def test_any_cut_is_read_under_any_other(tmp_path, whole, written, read):
    write(tmp_path, whole, written)
    with ShardReader(tmp_path) as reader:
        assert {name: entry.shape for name, entry in reader.entries.items()} == {k: v.shape for k, v in whole.items()}
        for name, tensor in whole.items():
            for offset, size in boxes(tensor.shape, read[: tensor.ndim]):
                target = Shard(name, tuple(tensor.shape), offset, torch.full(size, torch.nan, dtype=tensor.dtype))
                reader.check([target])
                reader.fill(target)
                assert torch.equal(target.data, window(tensor, offset, size))
        assert [int(reader.extra(rank)["rng"]) for rank in range(3)] == [0, 1, 2]


def target(name, tensor, **changes):
    fields = {"name": name, "shape": tuple(tensor.shape), "offset": (0,) * tensor.ndim, "data": tensor.clone()}
    return Shard(**{**fields, **changes})


def test_what_cannot_be_filled_is_refused(tmp_path, whole):
    write(tmp_path, whole, (2, 2, 1))
    x = whole["a/x"]
    cases = (
        (target("y", x), "holds no y, which this run needs"),
        (target("a/x", x, shape=(8, 10)), r"a/x is torch.float32 \[7, 10\], this one has torch.float32 \[8, 10\]"),
        (target("a/x", x.double()), "this one has torch.float64"),
        (target("a/x", x, offset=(3, 0)), "the files hold 40 of the 70 elements of a/x at"),
    )
    with ShardReader(tmp_path) as reader:
        for odd, message in cases:
            with pytest.raises(CheckpointError, match=message):
                reader.check([odd])


def edit(folder, rank, change):
    path = files_of(folder, rank)[1]
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


def test_damage_is_named(tmp_path, whole):
    write(tmp_path, whole, (2, 2, 1))
    edit(tmp_path, 1, lambda state: state["tensors"]["a/x"].update(shape=[7, 11]))
    with pytest.raises(CheckpointError, match=r"ranks disagree on a/x .*rank 1 says torch.float32 \[7, 11\]"):
        ShardReader(tmp_path)
    edit(tmp_path, 1, lambda state: state["tensors"]["a/x"].update(shape=[7, 10], dtype="load"))
    with pytest.raises(CheckpointError, match="unknown dtype 'load'"):
        ShardReader(tmp_path)
    write(tmp_path, whole, (2, 2, 1))
    tensors, described = files_of(tmp_path, 2)
    tensors.unlink()
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"00002\.safetensors does not exist"),
    ):
        reader.check([target(name, tensor) for name, tensor in whole.items()])
    described.unlink()
    with pytest.raises(CheckpointError, match=r"00002\.json does not exist; the checkpoint lacks the part of"):
        ShardReader(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: None, "lacks it"),
        (lambda t: t[:1].clone(), r"has torch\.float32 \[1, 4\]"),
        (lambda t: t.bfloat16(), r"has torch\.bfloat16 \[4, 4\]"),
    ],
)
def test_a_file_that_is_not_what_its_description_says_is_refused_before_anything_is_filled(
    tmp_path, whole, change, told
):
    write(tmp_path, whole, (2, 3, 1))
    path = next(p for p in (files_of(tmp_path, rank)[0] for rank in range(3)) if "a/x@3,6" in load_file(p))
    tensors = load_file(path)
    changed = change(tensors.pop("a/x@3,6"))
    save_file(tensors if changed is None else {**tensors, "a/x@3,6": changed}, path)
    odd = target("a/x", whole["a/x"], data=torch.full((7, 10), torch.nan))
    message = rf"{path} is damaged: a/x@3,6 is to be torch\.float32 \[4, 4\], and it {told}; use an earlier checkpoint"
    with ShardReader(tmp_path) as reader:
        for judge in (lambda: reader.check([odd]), lambda: reader.fill(odd)):
            with pytest.raises(CheckpointError, match=message):
                judge()
        reader.check([target("b", whole["b"])])
