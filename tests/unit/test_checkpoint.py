"""CheckpointStore: complete or absent, whatever happens while it is written, and damage is found before it is used."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moerl.checkpoint import LEARNER, LOOP_ARRAYS, LOOP_STATE, MANIFEST, Checkpoint, CheckpointStore
from moerl.errors import CheckpointError, RolloutError


class FilePolicy:
    """A learner that is one tensor file and one text file; what it saves tells the step."""

    def __init__(self, step=0, size=64):
        self.step = step
        self.size = size

    def save(self, folder):
        save_file({"w": torch.full((self.size,), float(self.step))}, folder / "part.safetensors")
        (folder / "part.json").write_text(json.dumps({"step": self.step}))

    def begin_save(self, folder):
        copy = FilePolicy(self.step, self.size)
        return lambda: copy.save(folder)


class FailingPolicy(FilePolicy):
    """Fails after its first file."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def save(self, folder):
        super().save(folder)
        raise self.error


def store_of(folder, keep=2, model_id="a" * 64, **options):
    return CheckpointStore(folder, keep=keep, model_id=model_id, config_id="c" * 64, **options)


def filled(folder, *steps, **options):
    store = store_of(folder, **options)
    for step in steps:
        store.save(step, FilePolicy(step), {"step": step})
    return store


def content(checkpoint):
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint.step, checkpoint.loop_state()["step"], json.loads((checkpoint.learner / "part.json").read_text())


def test_what_was_saved_comes_back(tmp_path):
    state = {"step": 3, "nested": {"a": [1, 0.1, None, "ü"]}}
    folder = store_of(tmp_path / "c").save(3, FilePolicy(3), state)
    found = store_of(tmp_path / "c").latest(on_corrupt="refuse")
    assert found is not None
    assert found.manifest["config_id"] == "c" * 64
    assert found.folder == folder == tmp_path / "c" / "step_000003"
    assert found.loop_state() == state
    assert sorted(found.manifest["files"]) == [f"{LEARNER}/part.json", f"{LEARNER}/part.safetensors", LOOP_STATE]


@pytest.mark.parametrize("in_background", [False, True])
def test_arrays_of_the_state_lie_in_a_file_of_their_own(tmp_path, in_background):
    routes = np.arange(6, dtype=np.uint8).reshape(3, 2)
    with store_of(tmp_path, in_background=in_background) as store:
        store.save(1, FilePolicy(1), {"step": 1, "groups": [{"routes": routes, "reward": np.array([np.nan])}]})
    found = store_of(tmp_path).open(1)
    (group,) = found.loop_state()["groups"]
    assert group["routes"].dtype == routes.dtype
    assert group["routes"].tolist() == routes.tolist()
    assert np.isnan(group["reward"]).all()
    _flip(found.folder / LOOP_ARRAYS)
    with pytest.raises(CheckpointError, match=f"{LOOP_ARRAYS} does not match its SHA-256"):
        store_of(tmp_path).open(1)


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert store_of(tmp_path / "absent").latest(on_corrupt="refuse") is None
    assert store_of(tmp_path / "absent").steps() == []
    with pytest.raises(CheckpointError, match=r"step_000004 is no complete checkpoint; there are steps \[\]"):
        store_of(tmp_path / "absent").open(4)


def test_the_newest_are_kept(tmp_path):
    store = filled(tmp_path, 1, 2, 3, 4)
    assert store.steps() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000004"]


@pytest.mark.parametrize("keep", [0, 1])
def test_the_last_one_is_never_deleted(tmp_path, keep):
    assert filled(tmp_path, 1, 2, keep=keep).steps() == [2]


def test_numbers_order_steps_not_letters(tmp_path):
    store = filled(tmp_path, 999_999, 1_000_000, 1_000_001)
    assert store.steps() == [1_000_000, 1_000_001]
    assert store.latest(on_corrupt="refuse").step == 1_000_001


def test_other_names_in_the_folder_are_no_checkpoints(tmp_path):
    store = filled(tmp_path, 1)
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000001.backup")
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_best")
    (tmp_path / "step_000007").mkdir()
    assert store.steps() == [1]
    store.save(2, FilePolicy(2), {"step": 2})
    assert (tmp_path / "step_best").is_dir()


@pytest.mark.parametrize("error", [RolloutError("boom"), KeyboardInterrupt(), ValueError("x")])
def test_a_save_that_fails_leaves_the_earlier_one_and_no_trace(tmp_path, error):
    store = filled(tmp_path, 1)
    with pytest.raises(type(error)):
        store.save(2, FailingPolicy(error), {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert content(store.latest(on_corrupt="refuse")) == (1, 1, {"step": 1})


def _save_and_die(folder, count, step):
    """In a child: save, but die without a word before the `count`-th operation on files; its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0

    def watch(event, arguments):
        nonlocal seen
        if event in {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir"}:
            seen += str(folder) in str(arguments[0]) or isinstance(arguments[0], int)
            if seen >= count:
                os._exit(77)

    sys.addaudithook(watch)
    store_of(folder).save(step, FilePolicy(step), {"step": step})
    os._exit(0)


def test_a_kill_between_any_two_file_operations_leaves_whole_checkpoints_only(tmp_path):
    filled(tmp_path / "origin", 1, 2)
    (tmp_path / "origin" / ".partial-step_000002" / "learner").mkdir(parents=True)
    seen = set()
    for count in range(1, 200):
        folder = tmp_path / f"kill{count}"
        shutil.copytree(tmp_path / "origin", folder)
        status = _save_and_die(folder, count, 3)
        assert status in (0, 77)
        store = store_of(folder)
        for step in store.steps():
            assert content(store.open(step)) == (step, step, {"step": step})
        latest = store.latest(on_corrupt="refuse")
        assert latest is not None
        seen.add(latest.step)
        assert latest.step in (2, 3)
        store.save(4, FilePolicy(4), {"step": 4})
        left = sorted(path.name for path in folder.iterdir())
        assert left == [f"step_{latest.step:06d}", "step_000004"]
        if status == 0:
            break
    assert status == 0
    assert count > 15
    assert seen == {2, 3}


def _truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": (f"{LEARNER}/part.safetensors", _truncate, "bytes, its manifest says"),
    "flipped byte": (f"{LEARNER}/part.safetensors", _flip, "does not match its SHA-256"),
    "flipped byte in the loop's state": (LOOP_STATE, _flip, "does not match its SHA-256"),
    "missing": (f"{LEARNER}/part.json", Path.unlink, "is missing from its checkpoint"),
    "emptied manifest": (MANIFEST, lambda path: path.write_text(""), "is damaged"),
    "torn manifest": (MANIFEST, _truncate, "is damaged"),
    "manifest of another kind": (MANIFEST, lambda path: path.write_text("[1]"), "is damaged"),
    "manifest without files": (MANIFEST, lambda path: path.write_text('{"format": 1}'), "is damaged"),
    "binary manifest": (MANIFEST, lambda path: path.write_bytes(b"\xff\xfe\x00"), "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_the_previous_one_used_if_asked(tmp_path, name, caplog):
    store = filled(tmp_path, 1, 2)
    file, damage, message = DAMAGES[name]
    damage(tmp_path / "step_000002" / file)
    with pytest.raises(CheckpointError) as caught:
        store.latest(on_corrupt="refuse")
    assert message in str(caught.value)
    assert file in str(caught.value)
    assert "checkpoint.on_corrupt=previous goes on from step 1" in str(caught.value)
    assert content(store.latest(on_corrupt="previous")) == (1, 1, {"step": 1})
    assert "going back to an earlier checkpoint" in caplog.text


def test_no_changed_character_of_a_manifest_goes_unnoticed(tmp_path):
    store = filled(tmp_path, 1, 2)
    path = tmp_path / "step_000002" / MANIFEST
    whole = path.read_bytes()
    places = [i for i, byte in enumerate(whole) if not chr(byte).isspace()][::7]
    assert len(places) > 50
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError):
            store.open(2)
        assert store.latest(on_corrupt="previous").step == 1


def test_all_damaged_says_so(tmp_path):
    store = filled(tmp_path, 1, 2)
    for step in (1, 2):
        _flip(tmp_path / f"step_{step:06d}" / LOOP_STATE)
    with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged \(steps \[1, 2\]\).*run.resume=never"):
        store.latest(on_corrupt="previous")


def test_the_only_one_damaged_says_what_to_do(tmp_path):
    store = filled(tmp_path, 1)
    _flip(tmp_path / "step_000001" / LOOP_STATE)
    with pytest.raises(CheckpointError, match=r"there is no earlier one: start anew with run.resume=never"):
        store.latest(on_corrupt="refuse")


@pytest.mark.parametrize("on_corrupt", ["refuse", "previous"])
def test_another_model_is_refused_and_not_passed_over(tmp_path, on_corrupt):
    filled(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"made by another model \(a{12}, this one is b{12}\)"):
        store_of(tmp_path, model_id="b" * 64).latest(on_corrupt=on_corrupt)


def test_a_renamed_folder_is_no_other_step(tmp_path):
    store = filled(tmp_path, 1)
    (tmp_path / "step_000001").rename(tmp_path / "step_000005")
    with pytest.raises(CheckpointError, match="is of step 1: the folder was renamed"):
        store.open(5)


def test_a_later_version_of_the_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("moerl.manifest.FORMAT", 3)
    filled(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 3, this version reads 2"):
        store_of(tmp_path).open(1)


def test_going_back_behind_a_damaged_one_never_deletes_the_good_ones_made_after_it(tmp_path):
    store = filled(tmp_path, 3, 6, keep=2)
    _flip(tmp_path / "step_000006" / LOOP_STATE)
    assert store.latest(on_corrupt="previous").step == 3
    again = store_of(tmp_path, keep=1)
    again.save(4, FilePolicy(4), {"step": 4})
    assert again.steps() == [4]
    assert content(again.latest(on_corrupt="refuse")) == (4, 4, {"step": 4})


def test_a_step_that_is_saved_again_replaces_the_damaged_one(tmp_path):
    store = filled(tmp_path, 1, 2)
    _flip(tmp_path / "step_000002" / LOOP_STATE)
    store.save(2, FilePolicy(2), {"step": 2})
    assert content(store.latest(on_corrupt="refuse")) == (2, 2, {"step": 2})


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here; the limit on file sizes is tested in its place")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_the_earlier_checkpoint_stands(small_disk):
    store = filled(small_disk / "c", 1)
    for policy in (FilePolicy(2, size=100_000), FilePolicy(3, size=100_000)):
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*(No space left|os error 28)") as caught:
            store.save(policy.step, policy, {"step": policy.step})
        assert "earlier checkpoints are untouched: free space" in str(caught.value)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(4, FilePolicy(4), {"text": "x" * 100_000})
    assert content(store.latest(on_corrupt="refuse")) == (1, 1, {"step": 1})
    store.save(5, FilePolicy(5), {"step": 5})
    assert store.steps() == [1, 5]


def test_a_limit_on_file_sizes_is_told_like_a_full_disk(tmp_path):
    store = filled(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*(File too large|os error 27)"):
            store.save(2, FilePolicy(2, size=100_000), {"step": 2})
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*File too large"):
            store.save(2, FilePolicy(2), {"text": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert content(store.latest(on_corrupt="refuse")) == (1, 1, {"step": 1})


def test_state_that_is_not_json_is_a_mistake_in_the_program(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        store_of(tmp_path).save(1, FilePolicy(1), {"step": float("nan")})
    assert store_of(tmp_path).steps() == []
