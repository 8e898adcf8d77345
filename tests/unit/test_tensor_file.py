"""Files read by offset and written as a stream are the library's own, and a damaged header is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moerl.errors import CheckpointError
from moerl.manifest import PARTS_SUM
from moerl.tensor_file import Described, TensorFile, TensorFileWriter, summed_reads

TENSORS = {
    "a": torch.arange(120.0).view(2, 3, 4, 5),
    "b": torch.arange(7).bfloat16(),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
}


def test_either_side_reads_what_the_other_writes(tmp_path):
    save_file(TENSORS, tmp_path / "theirs")
    with TensorFile(tmp_path / "theirs") as file:
        assert sorted(file.names()) == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert torch.equal(file.read(name), tensor)
            assert file.read(name).dtype == tensor.dtype
    described = [Described(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]
    with TensorFileWriter(tmp_path / "ours", described) as writer:
        for tensor in TENSORS.values():
            writer.add(tensor)
    content = (tmp_path / "ours").read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    parts = [content[:head]]
    for tensor in TENSORS.values():
        parts.append(content[sum(map(len, parts)) :][: tensor.nbytes])
    sums = "".join(hashlib.sha256(part).hexdigest() for part in parts)
    assert b"".join(parts) == content
    assert writer.sum() == {"bytes": len(content), PARTS_SUM: hashlib.sha256(sums.encode()).hexdigest()}
    with TensorFile(tmp_path / "ours") as file:
        assert file.sum() == writer.sum()[PARTS_SUM]
    for name, tensor in load_file(tmp_path / "ours").items():
        assert torch.equal(tensor, TENSORS[name])


def written(path: Path, *tensors: torch.Tensor) -> str:
    """The sum that the writer gives."""
    with TensorFileWriter(path, [Described(str(i), t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]) as writer:
        for tensor in tensors:
            writer.add(tensor)
    return writer.sum()[PARTS_SUM]


def test_what_is_read_whole_is_summed_and_needs_no_second_look(tmp_path):
    save_file(TENSORS, tmp_path / "file")
    with TensorFile(tmp_path / "file") as file, summed_reads() as sums:
        for name in ("scalar", "a", "empty"):
            file.read_box(name, [0] * TENSORS[name].ndim, TENSORS[name].shape)
        file.read_box("b", [1], [3])  # a part of one tells nothing of it
        file.read("a")
        (found,) = sums.values()
        assert found == {
            name: hashlib.sha256(TENSORS[name].numpy().tobytes()).hexdigest() for name in ("scalar", "a", "empty")
        }
        assert file.sum(found) == file.sum()
        assert file.sum({**found, "a": "0" * 64}) != file.sum()
    with TensorFile(tmp_path / "file") as file:
        file.read("b")
        assert sums == {str(tmp_path / "file"): found}  # not asked to any more


def test_a_file_that_changes_between_two_reads_is_told(tmp_path):
    save_file(TENSORS, tmp_path / "file")
    with TensorFile(tmp_path / "file") as file, summed_reads():
        file.read("a")
        save_file({**TENSORS, "a": TENSORS["a"] + 1}, tmp_path / "other")
        (tmp_path / "file").write_bytes((tmp_path / "other").read_bytes())
        with pytest.raises(CheckpointError, match="a was another one when it was read before"):
            file.read("a")


def test_what_goes_from_file_to_file_has_its_own_sum_whatever_happens_to_it_between(tmp_path):
    save_file({"a": torch.arange(12.0).view(3, 4), "b": torch.ones(3, 4)}, tmp_path / "file")
    with TensorFile(tmp_path / "file") as file:
        changes = {
            "nothing": lambda tensor: tensor,
            "another view": lambda tensor: tensor.view(4, 3),
            "turned": lambda tensor: tensor.t(),
            "cast": lambda tensor: tensor.bfloat16(),
            "a part": lambda tensor: tensor[:2],
            "changed in place": lambda tensor: tensor.add_(1),
            "changed through a view": lambda tensor: (tensor[1].mul_(3), tensor)[1],
            "one that was read before": lambda tensor: (file.read("b"), tensor)[1],
        }
        for name, change in changes.items():
            with summed_reads():
                tensor = change(file.read("a"))
                told = written(tmp_path / name, tensor)
            with TensorFile(tmp_path / name) as made:
                assert made.sum() == told, name
            assert told == written(tmp_path / "again", tensor.clone()), name


@settings(deadline=None)
@given(data=st.data())
def test_a_box_is_the_slice(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "boxes"
    if not path.exists():
        save_file(TENSORS, path)
    spans = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in TENSORS["a"].shape]
    with TensorFile(path) as file:
        found = file.read_box("a", [a for a, _ in spans], [b - a for a, b in spans])
    assert torch.equal(found, TENSORS["a"][tuple(slice(a, b) for a, b in spans)])


def test_a_writer_takes_what_was_announced_and_all_of_it(tmp_path):
    one = [Described("w", torch.float32, (2,))]
    with pytest.raises(CheckpointError, match="w came as"), TensorFileWriter(tmp_path / "x", one) as writer:
        writer.add(torch.zeros(3))
    with pytest.raises(CheckpointError, match="w never came"), TensorFileWriter(tmp_path / "x", one):
        pass


def _file(header: object, size: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def _two(first: list[int], second: list[int]) -> dict[str, object]:
    return {
        "u": {"dtype": "U8", "shape": [4], "data_offsets": first},
        "v": {"dtype": "U8", "shape": [4], "data_offsets": second},
    }


DAMAGE = {
    "nothing": (b"", "hold no header"),
    "header longer than the file": ((99).to_bytes(8, "little") + b"{}", "its header would have 99 bytes"),
    "no json": (_file(b"{{", 0), "its header is not valid"),
    "a list": (_file([1], 0), "its header is not valid"),
    "overlap": (_file(_two([0, 4], [2, 6]), 6), "v begins at byte"),
    "gap": (_file(_two([0, 4], [5, 9]), 9), "v begins at byte"),
    "truncated data": (_file(_two([0, 4], [4, 8]), 5), "its tensors end at byte"),
    "data left over": (_file(_two([0, 4], [4, 8]), 9), "its tensors end at byte"),
    "wrong size": (_file(_two([0, 4], [4, 9]), 9), "v takes 4 bytes"),
    "unknown type": (_file({"u": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}, 1), "unknown type 'F3'"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path, kind):
    content, message = DAMAGE[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"model.safetensors is truncated or damaged.*{message}"):
        TensorFile(path)


def test_a_loop_of_links_and_a_missing_file_are_named(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("loop", "absent"):
        with pytest.raises(CheckpointError, match=f"{name} is truncated or damaged"):
            TensorFile(tmp_path / name)
