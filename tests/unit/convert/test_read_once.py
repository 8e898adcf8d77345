"""What a layout shares out among ranks is read once, wherever its files end; counted byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conversions import convert
from small_configs import save_random

from moerl.convert.compare import compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout, pieces_by_ranks
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.models.rules import GateUp
from moerl.tensor_file import Described, TensorFile

LAYOUTS = [Layout(tensor=2), Layout(tensor=4, expert_tensor=2), Layout(tensor=2, pipeline=2, expert=2)]


def described_in(path: Path) -> list[Described]:
    with TensorFile(path) as file:
        return [file.describe(name) for name in file.names()]


def misread(work: Callable[[], object], folder: Path, monkeypatch) -> dict[str, list[tuple[int, int]]]:
    """File -> (first byte, end) of values that `work` reads another number of times than once; empty where none is."""
    reads: list[tuple[str, int, int]] = []
    fill = TensorFile._fill

    def counted(file: TensorFile, view: memoryview, start: int) -> None:
        if file._tensors and len(view):  # and not its header
            reads.append((file.path.name, start, start + len(view)))
        fill(file, view, start)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFile, "_fill", counted)
        work()
    odd: dict[str, list[tuple[int, int]]] = {}
    for path in folder.glob("*.safetensors"):
        size = path.stat().st_size
        at = size - sum(one.num_bytes for one in described_in(path))
        spans = sorted((start, end) for name, start, end in reads if name == path.name)
        for start, end in [*spans, (size, size)]:
            if start != at:
                odd.setdefault(path.name, []).append((min(start, at), max(start, at)))
            at = end
    return odd


def test_the_count_sees_what_is_read_twice_and_what_is_not(tmp_path, monkeypatch):
    folder = save_random(tmp_path / "hf", "mixtral")
    weights = find(folder).open()
    first, *others = sorted(weights.names())

    def read(*names: str) -> Callable[[], object]:
        return lambda: [find(folder).open().get(name) for name in names]

    assert not misread(read(first, *others), folder, monkeypatch)
    assert misread(read(first, first, *others), folder, monkeypatch)
    assert misread(read(*others), folder, monkeypatch)


@pytest.mark.parametrize("max_file_bytes", [3_000, 1_000_000])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_every_byte_is_read_once_from_either_form(family, max_file_bytes, tmp_path, monkeypatch):
    source = save_random(tmp_path / "hf", family)
    options = Options(threads=3, max_file_bytes=max_file_bytes)
    before = source
    for number, layout in enumerate(LAYOUTS):
        out = tmp_path / f"shards{number}"
        for folder in {source, before}:
            work = partial(import_checkpoint, find(folder), out, layout, replace(options, overwrite=True))
            assert not misread(work, folder, monkeypatch), (layout, folder.name)
            assert not compare_weights(find(source), find(out)).differences
        before = out


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_sums_are_held_while_it_is_read_once(layout, tmp_path, monkeypatch):
    export_checkpoint(find(save_random(tmp_path / "hf", "qwen3_moe")), tmp_path / "copy", Options())
    place = find(tmp_path / "copy")
    assert place.summed_files()
    options = Options(holds_sums=True, threads=2, max_file_bytes=3_000)
    assert not misread(lambda: import_checkpoint(place, tmp_path / "out", layout, options), place.path, monkeypatch)
    path = tmp_path / "copy" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its SHA-256"):
        import_checkpoint(place, tmp_path / "again", layout, options)
    assert not (tmp_path / "again").exists()


def test_files_end_between_tensors_of_the_source(tmp_path):
    """So that no two threads, processes or starts read one; and are no larger than they may be but for the largest."""
    source = save_random(tmp_path / "hf", "qwen3_moe")
    most = 3_000
    import_checkpoint(find(source), tmp_path / "out", LAYOUTS[1], Options(max_file_bytes=most))
    rules = find(source).family.weight_rules(find(source).hf)
    read_for: dict[str, object] = {}
    for pieces in pieces_by_ranks(rules, LAYOUTS[1]).values():
        for piece in pieces:
            half = piece.start[0] >= piece.rule.hf_shapes[0][0] if isinstance(piece.rule, GateUp) else None
            read_for[piece.name] = (piece.rule.megatron_name, half)
    places: dict[object, set[str]] = {}
    files = sorted((tmp_path / "out").glob("rank_*.safetensors"))
    assert len(files) > 5
    for path in files:
        for one in described_in(path):
            places.setdefault(read_for.pop(one.name), set()).add(path.name)
        if sum(one.num_bytes for one in described_in(path)) > most:
            assert len({name for name in places if path.name in places[name]}) == 1
    assert not read_for
    assert max(map(len, places.values())) == 1


def test_several_processes_and_a_second_start_share_them_too(tmp_path):
    source = save_random(tmp_path / "hf", "qwen3_moe")
    sizes = ("--tensor", "4", "--expert-tensor", "2")
    both = [convert("import", source, tmp_path / "out", *sizes, world=(rank, 2)) for rank in range(2)]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert not compare_weights(find(source), find(tmp_path / "out")).differences
