"""A converted source is held against its manifest while it is read: every byte, once, before anything is in place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import convert
from tiny_models import save_model

from moerl.__main__ import main
from moerl.convert.building import Building, PlannedFile
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.inspection import damaged_files, refuse_damage
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.manifest import PARTS_SUM
from moerl.tensor_file import Described, TensorFile, TensorFileWriter

HELD = Options(holds_sums=True, threads=2, max_file_bytes=60_000)


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_model(tmp_path / "hf", "dense_first")


@pytest.fixture
def shards(folder, tmp_path) -> Path:
    import_checkpoint(find(folder), tmp_path / "shards", Layout(tensor=2, expert=2), Options(max_file_bytes=90_000))
    return tmp_path / "shards"


def damage(path: Path, name: str) -> None:
    """One bit of one tensor; size and time stay."""
    stat = path.stat()
    with TensorFile(path) as file:
        start = file._tensors[name][1]
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def tensors_of(folder: Path) -> list[tuple[Path, str]]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with TensorFile(path) as file:
            found += [(path, name) for name in file.names()]
    return found


def bytes_read(work: Callable[[], object]) -> int:
    """By this process, from wherever."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    work()
    return count() - before


def test_a_bit_of_any_tensor_is_found_and_nothing_is_there(shards, tmp_path):
    every = tensors_of(shards)
    kinds = {name.split("@")[0].replace(".0.", ".N.").replace(".1.", ".N."): (path, name) for path, name in every}
    assert len(kinds) > 20
    for path, name in list(kinds.values())[::4]:
        kept = path.read_bytes()
        damage(path, name)
        with pytest.raises(CheckpointError, match=rf"{path.name} does not match its SHA-256 .*--skip-checksums"):
            export_checkpoint(find(shards), tmp_path / "back", HELD)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "shards"]
        path.write_bytes(kept)
    export_checkpoint(find(shards), tmp_path / "back", HELD)
    assert not damaged_files(find(tmp_path / "back"))


@pytest.mark.skipif(not Path("/proc/self/io").is_file(), reason="nothing counts the bytes that this process reads")
def test_every_byte_of_the_source_is_read_once(folder, tmp_path):
    import_checkpoint(find(folder), tmp_path / "shards", Layout(expert=2), Options())
    size = sum(path.stat().st_size for path in (tmp_path / "shards").glob("*.safetensors"))

    def export() -> None:
        place = find(tmp_path / "shards")
        refuse_damage(place, is_held_later=True)
        export_checkpoint(place, tmp_path / "back", Options(holds_sums=True))

    def check_first() -> None:
        place = find(tmp_path / "shards")
        refuse_damage(place)
        export_checkpoint(place, tmp_path / "again", Options())

    assert size <= bytes_read(export) < 1.4 * size  # descriptions, configuration, and what Python imports
    assert bytes_read(check_first) > 1.9 * size


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "fp8_blocks": True}])
def test_what_is_written_has_the_sums_of_its_own_bytes(shards, tmp_path, options):
    export_checkpoint(find(shards), tmp_path / "back", Options(holds_sums=True, **options))
    place = find(tmp_path / "back")
    assert [PARTS_SUM in entry for entry in place.summed_files().values()] == [True]
    assert not damaged_files(place)
    import_checkpoint(place, tmp_path / "again", Layout(tensor=2), Options(holds_sums=True))
    assert not damaged_files(find(tmp_path / "again"))


def test_what_is_read_in_parts_or_not_at_all_is_held_too(tmp_path):
    """Experts of gpt-oss lie in one tensor, of which each is read by itself; one that is left out is not read."""
    source = save_model(tmp_path / "hf", "fused")
    export_checkpoint(find(source), tmp_path / "copy", Options())
    for name in ("model.layers.2.mlp.experts.gate_up_proj", "model.layers.1.self_attn.sinks"):
        kept = (tmp_path / "copy" / "model.safetensors").read_bytes()
        damage(tmp_path / "copy" / "model.safetensors", name)
        with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its SHA-256"):
            import_checkpoint(find(tmp_path / "copy"), tmp_path / "out", Layout(), HELD)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["copy", "hf"]
        (tmp_path / "copy" / "model.safetensors").write_bytes(kept)


def test_of_several_processes_the_first_holds_what_all_have_read(shards, tmp_path):
    path, name = tensors_of(shards)[-1]
    damage(path, name)
    arguments = ("export", shards, tmp_path / "back", "--max-shard-size", "60KB")
    both = [convert(*arguments, world=(rank, 2)) for rank in range(2)]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [1, 0]
    assert f"{path.name} does not match its SHA-256" in " ".join(told[0].split())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "shards"]


def test_an_interrupted_conversion_remembers_what_it_read(tmp_path):
    """The first file was made of good bytes, the second is made of bad ones, after the kill."""
    tensors = [Described(name, torch.float32, (4,)) for name in ("a", "b")]
    with TensorFileWriter(tmp_path / "source", tensors) as writer:
        for value in (1.0, 2.0):
            writer.add(torch.full((4,), value))
    source = TensorFile(tmp_path / "source")
    files = [PlannedFile(one.name, (one,)) for one in tensors]
    fails = [True]

    def make(number: int):
        if number and fails:
            raise CheckpointError("killed")
        yield source.read(tensors[number].name)

    def build():
        held = {tmp_path / "source": writer.sum()}
        return Building(tmp_path / "out", files, {}, held=held).build(make, lambda *_: None)

    with pytest.raises(CheckpointError, match="killed"):
        build()
    note = json.loads((tmp_path / ".out.converting" / "notes" / "0.json").read_text())
    assert note["read"].keys() == {str(tmp_path / "source")}
    fails.clear()
    kept = (tmp_path / "source").read_bytes()
    damage(tmp_path / "source", "b")
    with pytest.raises(CheckpointError, match="source does not match its SHA-256"):
        build()
    assert not (tmp_path / ".out.converting").exists()
    (tmp_path / "source").write_bytes(kept)
    built = build()
    assert built is not None
    assert built.num_resumed == 0
    assert (tmp_path / "out" / "b").is_file()


def test_skipping_the_checksums_reads_it_all_the_same_and_starts_anew(shards, tmp_path, capsys):
    path, name = tensors_of(shards)[0]
    damage(path, name)
    for command in (["export", str(shards), str(tmp_path / "back")], ["import", str(shards), str(tmp_path / "back")]):
        assert main(["convert", *command]) == 1
        assert f"{path.name} does not match its SHA-256" in " ".join(capsys.readouterr().err.split())
    assert main(["convert", "export", str(shards), str(tmp_path / "back"), "--skip-checksums"]) == 0
