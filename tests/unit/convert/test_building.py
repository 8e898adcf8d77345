"""A target is whole or absent: kills, several processes, small disks, damaged sources."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conversions import convert
from safetensors.torch import load_file, save_file
from tiny_models import save_model

from moerl.convert import claims
from moerl.convert.building import Building, PlannedFile
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError, ConfigError, DataError
from moerl.tensor_file import Described
from moerl.world import World


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_model(tmp_path / "hf", "softmax")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Slowly:
    """Files of one tensor each, of which the maker waits for a sign."""

    def __init__(self, count: int) -> None:
        self.files = [PlannedFile(f"f{i}", (Described("x", torch.float32, (4,)),)) for i in range(count)]
        self.made: list[int] = []
        self.fails_at: int | None = None

    def make(self, number: int):
        if number == self.fails_at:
            raise CheckpointError("no more")
        self.made.append(number)
        yield torch.full((4,), float(number))


def test_whole_files_are_not_made_again(tmp_path):
    work = Slowly(4)
    work.fails_at = 3
    with pytest.raises(CheckpointError, match="no more"):
        Building(tmp_path / "out", work.files, {"a": 1}).build(work.make, lambda *_: None)
    assert not (tmp_path / "out").exists()
    assert work.made == [0, 1, 2]
    work.fails_at = None
    built = Building(tmp_path / "out", work.files, {"a": 1}).build(work.make, lambda *_: None)
    assert built is not None
    assert built.num_resumed == 3
    assert work.made == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert [float(load_file(tmp_path / "out" / f"f{i}")["x"][0]) for i in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("identity", "name"), [({"a": 2}, "x"), ({"a": 1}, "y")])
def test_another_plan_starts_anew(tmp_path, identity, name):
    """Also one whose files have the same names and sizes, but other tensors."""
    work = Slowly(3)
    work.fails_at = 2
    with pytest.raises(CheckpointError, match="no more"):
        Building(tmp_path / "out", work.files, {"a": 1}).build(work.make, lambda *_: None)
    work.fails_at = None
    files = [PlannedFile(file.name, (Described(name, torch.float32, (4,)),)) for file in work.files]
    built = Building(tmp_path / "out", files, identity).build(work.make, lambda *_: None)
    assert built is not None
    assert built.num_resumed == 0
    assert work.made == [0, 1, 0, 1, 2]


def test_a_half_written_file_is_made_again(tmp_path):
    work = Slowly(3)
    work.fails_at = 2
    with pytest.raises(CheckpointError, match="no more"):
        Building(tmp_path / "out", work.files, {}).build(work.make, lambda *_: None)
    half = tmp_path / ".out.converting" / "folder" / "f1"
    half.write_bytes(half.read_bytes()[:-4])
    work.fails_at = None
    Building(tmp_path / "out", work.files, {}).build(work.make, lambda *_: None)
    assert work.made == [0, 1, 1, 2]


def test_a_failing_end_leaves_the_old_target_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    work = Slowly(1)

    def finish(folder, built):
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="exists and is left as it is"):
        Building(tmp_path / "out", work.files, {}).build(work.make, finish)
    with pytest.raises(CheckpointError, match=r"cannot write .*out \(No space left on device\)"):
        Building(tmp_path / "out", work.files, {}, overwrite=True).build(work.make, finish)
    assert contents(tmp_path / "out") == {"mine": b"kept"}
    Building(tmp_path / "out", work.files, {}, overwrite=True).build(work.make, lambda *_: None)
    assert contents(tmp_path / "out").keys() == {"f0"}


def test_too_few_open_files_are_not_told_as_too_little_space(tmp_path):
    work = Slowly(1)

    def make(number):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(CheckpointError, match=r"Too many open files.*ulimit -n") as caught:
        Building(tmp_path / "out", work.files, {}).build(make, lambda *_: None)
    assert "space" not in str(caught.value)


def test_two_conversions_into_one_target_are_refused(tmp_path):
    work = Slowly(1)

    def make(number):
        with pytest.raises(ConfigError, match="another process is converting into"):
            Building(tmp_path / "out", work.files, {}).build(work.make, lambda *_: None)
        yield from work.make(number)

    Building(tmp_path / "out", work.files, {}).build(make, lambda *_: None)
    assert (tmp_path / "out" / "f0").is_file()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    huge = [PlannedFile("f", (Described("x", torch.uint8, (free + 10**9,)),))]
    with pytest.raises(CheckpointError, match=r"needs \d+\.\d\d GB more, and its disk has \d+\.\d\d GB free"):
        Building(tmp_path / "out", huge, {}).build(lambda i: iter(()), lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_sigkill_and_the_same_command(folder, tmp_path):
    """Small files, so that there is a moment in the middle."""
    out, building = tmp_path / "out", tmp_path / ".out.converting"
    arguments = ("import", folder, out, "--max-shard-size", 1000, "--threads", 1)
    process = convert(*arguments)
    while not len(list((building / "notes").glob("*.json"))) > 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    again = convert(*arguments)
    told, faults = again.communicate(timeout=120)
    assert again.returncode == 0, faults
    assert "of them from an earlier start" in told
    assert not building.exists()
    import_checkpoint(find(folder), tmp_path / "whole", Layout(), Options(max_file_bytes=1000))
    mine, straight = contents(out), contents(tmp_path / "whole")
    assert {n: v for n, v in mine.items() if n != "manifest.json"} == {
        n: v for n, v in straight.items() if n != "manifest.json"
    }


def test_processes_share_the_files(folder, tmp_path):
    arguments = ("--max-shard-size", "20KB")
    both = [convert("import", folder, tmp_path / "shards", *arguments, world=(rank, 2)) for rank in range(2)]
    for process in both:
        _, faults = process.communicate(timeout=120)
        assert process.returncode == 0, faults
    import_checkpoint(find(folder), tmp_path / "alone", Layout(), Options(max_file_bytes=20_000))
    for name, content in contents(tmp_path / "alone").items():
        assert name == "manifest.json" or contents(tmp_path / "shards")[name] == content, name


def test_a_process_without_a_file_to_make_may_come_last(tmp_path, monkeypatch):
    """The first one waits until all have seen it, and takes nothing away from under them."""
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 30.0)
    work = Slowly(1)
    first, second = (Building(tmp_path / "out", work.files, {}, world=World(rank, 2)) for rank in range(2))
    with ThreadPoolExecutor() as pool:
        built = pool.submit(first.build, work.make, lambda *_: None)
        time.sleep(0.3)
        assert not built.done()
        assert pool.submit(second.build, work.make, lambda *_: None).result(20) is None
        assert built.result(20) is not None
    assert load_file(tmp_path / "out" / "f0")["x"].tolist() == [0.0] * 4
    assert not list(tmp_path.glob(".out*"))


def test_a_first_process_that_checks_its_source_for_long_is_waited_for(tmp_path, monkeypatch):
    work = Slowly(2)
    first, second = (Building(tmp_path / "out", work.files, {}, world=World(rank, 2)) for rank in range(2))
    with ThreadPoolExecutor() as pool:
        monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.2)
        waiting = pool.submit(second.build, work.make, lambda *_: None)
        time.sleep(0.6)
        assert not waiting.done()
        monkeypatch.setattr(claims, "PATIENCE_SECONDS", 30.0)
        assert first.build(work.make, lambda *_: None) is not None
        assert waiting.result(20) is None


def test_processes_of_another_launch_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PLAN_SECONDS", 1.0)
    work, other = Slowly(2), Slowly(2)
    halfway, go_on = threading.Event(), threading.Event()

    def make(number: int):
        halfway.set()
        assert go_on.wait(20)
        yield from work.make(number)

    def started(launch: str, rank: int) -> Building:
        return Building(tmp_path / "out", work.files, {}, world=World(rank, 2, launch=launch))

    with ThreadPoolExecutor() as pool:
        ours = [pool.submit(started("a", rank).build, make, lambda *_: None) for rank in range(2)]
        assert halfway.wait(20)
        with pytest.raises(ConfigError, match="another process is converting"):
            started("b", 0).build(other.make, lambda *_: None)
        with pytest.raises(CheckpointError, match="waited 1 s for the first process to plan"):
            started("b", 1).build(other.make, lambda *_: None)
        go_on.set()
        assert [one.result(20) is None for one in ours] == [False, True]
    assert other.made == []
    assert sorted(work.made) == [0, 1]


def test_a_full_disk_leaves_nothing_but_what_can_go_on(folder, tmp_path):
    """A limit on the size of files refuses as a full disk does."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    process = convert("export", folder, tmp_path / "out", preexec_fn=limit)
    _, faults = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "cannot write" in faults
    assert "Traceback" not in faults
    assert not (tmp_path / "out").exists()
    assert convert("export", folder, tmp_path / "out").wait(timeout=120) == 0


def test_a_target_that_cannot_be_made_is_named(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/out \(Not a directory\)"):
        export_checkpoint(find(folder), tmp_path / "file" / "out", Options())


@pytest.mark.parametrize("target", ["hf", "hf/inside", "."])
def test_a_target_around_or_inside_the_source_is_refused(folder, tmp_path, target):
    with pytest.raises(ConfigError, match="lie inside one another"):
        import_checkpoint(find(folder), tmp_path / target, Layout(), Options(overwrite=True))
    assert (folder / "model.safetensors").is_file()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def overlapping(folder: Path) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))


def without_one(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def with_one_more(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.2.mlp.extra": torch.zeros(3)}, folder / "model.safetensors")


def of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")


def with_an_index_that_lies(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))


def without_a_file(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))


def with_a_new_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_sinks": 4}))


def without_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


DAMAGE = {
    truncated: "truncated or damaged",
    overlapping: "b begins at byte",
    without_one: r"unfilled parameters: .*model\.layers\.2\.mlp\.experts\.3\.down_proj\.weight",
    with_one_more: r"unmapped tensors: model\.layers\.2\.mlp\.extra",
    of_another_shape: r"tensor 'lm_head\.weight' has shape",
    with_an_index_that_lies: "lacks x",
    without_a_file: r"lists gone\.safetensors",
    with_a_new_field: "attention_sinks=4 may change what the model computes",
    without_json: "not valid JSON",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_source_is_refused_and_the_target_left_as_it_was(folder, tmp_path, damage):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    damage(folder)
    for action in (
        lambda: import_checkpoint(find(folder), tmp_path / "out", Layout(tensor=2), Options(overwrite=True)),
        lambda: export_checkpoint(find(folder), tmp_path / "out", Options(overwrite=True)),
    ):
        with pytest.raises((CheckpointError, DataError), match=DAMAGE[damage]):
            action()
        assert contents(tmp_path / "out") == {"mine": b"kept"}


def test_what_may_be_left_out_is_named_and_recorded(folder, tmp_path):
    with_one_more(folder)
    options = Options(allowed=(r"model\.layers\.\d+\.mlp\.extra",))
    import_checkpoint(find(folder), tmp_path / "shards", Layout(), options)
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert manifest["unmapped"] == ["model.layers.2.mlp.extra"]
    assert manifest["allow_unmapped"] == list(options.allowed)
    export_checkpoint(find(folder), tmp_path / "back", options)
    assert json.loads((tmp_path / "back" / "moerl_manifest.json").read_text())["unmapped"] == manifest["unmapped"]


@pytest.mark.parametrize("leads_to", ["out", "nowhere", "elsewhere"])
def test_a_target_that_is_a_link_is_replaced_itself_and_only_when_asked(folder, tmp_path, leads_to):
    """A circle of links, one to nothing, one to a folder of somebody else's."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("kept")
    (tmp_path / "out").symlink_to(tmp_path / leads_to)
    with pytest.raises(ConfigError, match="out exists and is left as it is"):
        export_checkpoint(find(folder), tmp_path / "out", Options())
    assert (tmp_path / "out").is_symlink()
    export_checkpoint(find(folder), tmp_path / "out", Options(overwrite=True))
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert contents(tmp_path / "elsewhere") == {"mine": b"kept"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "hf", "out"]


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no file system that is read-only even for the superuser")
def test_a_target_that_cannot_be_written_is_told_and_nothing_is_there(folder):
    for action in (
        lambda: import_checkpoint(find(folder), Path("/sys/kernel/out"), Layout(), Options()),
        lambda: export_checkpoint(find(folder), Path("/sys/kernel/out"), Options()),
    ):
        refusal = r"\((Operation not permitted|Permission denied|Read-only file system)\); /sys/kernel/out is as it was"
        with pytest.raises(CheckpointError, match=rf"cannot write /sys/kernel/out {refusal}"):
            action()
    assert not list(Path("/sys/kernel").glob("*out*"))


def test_links_in_a_circle_among_the_files_are_told(folder, tmp_path):
    config, weights = folder / "config.json", folder / "model.safetensors"
    weights.unlink()
    weights.symlink_to(weights)
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        import_checkpoint(find(folder), tmp_path / "out", Layout(), Options())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lists model\.safetensors, which .* lacks"):
        import_checkpoint(find(folder), tmp_path / "out", Layout(), Options())
    config.unlink()
    config.symlink_to(config)
    with pytest.raises(CheckpointError, match=r"it has neither config\.json"):
        find(folder)


def test_a_circle_of_links_is_told(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"Too many levels of symbolic links"):
        find(tmp_path / "a")
