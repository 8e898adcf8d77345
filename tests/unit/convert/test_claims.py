"""What a killed launch left behind is no sign of life, also where the next one has the same name."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moerl.convert import claims
from moerl.convert.building import Building, PlannedFile
from moerl.errors import CheckpointError
from moerl.tensor_file import Described
from moerl.world import World

FILES = [PlannedFile(f"f{i}", (Described("x", torch.float32, (4,)),)) for i in range(4)]


@pytest.fixture(autouse=True)
def limited(monkeypatch):
    """A test that is wrong ends."""
    monkeypatch.setattr(claims, "PLAN_SECONDS", 20.0)
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 20.0)


class Process:
    """One of two of the launch `node0 29500`, as a static rendezvous names every launch."""

    def __init__(self, out: Path, rank: int, of: int = 2, words: str = "") -> None:
        self.made: list[int] = []
        self.dies_at: int | None = None
        self.dies_after: threading.Event | None = None
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self.finishes, self.ends = threading.Event(), threading.Event()
        self.goes_on.set()
        self.ends.set()
        self._building = Building(out, FILES, {"words": words}, world=World(rank, of, launch="node0 29500"))

    def build(self):
        return self._building.build(self._make, self._finish)

    def _finish(self, *_) -> None:
        self.finishes.set()
        assert self.ends.wait(20)

    def _make(self, number: int):
        if number == self.dies_at:
            assert self.dies_after is None or self.dies_after.wait(20)
            raise CheckpointError("killed")
        self.waits.set()
        assert self.goes_on.wait(20)
        self.made.append(number)
        yield torch.full((4,), float(number))


def die(first: Process) -> None:
    """Its lock is free and its claim still there, as after a kill."""
    first.dies_at = 2
    with pytest.raises(CheckpointError, match="killed"):
        first.build()


def test_the_claim_of_a_dead_launch_lets_nobody_write(tmp_path):
    out = tmp_path / "out"
    die(Process(out, 0))
    assert (tmp_path / ".out.converting" / "claim").is_file()
    first, second = Process(out, 0), Process(out, 1)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(second.build)
        time.sleep(1.0)  # the first one hashes its source
        assert second.made == []
        assert not (tmp_path / ".out.converting" / "seen" / "1").exists()
        built = first.build()
        assert other.result(20) is None
    assert built is not None
    assert built.num_resumed == 1
    assert (first.made, second.made) == ([2], [1, 3])
    assert [float(load_file(out / f"f{i}")["x"][0]) for i in range(4)] == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_who_checks_its_share_for_long_is_waited_for_and_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.3)
    first, second = (Process(tmp_path / "out", rank) for rank in (0, 1))
    with ThreadPoolExecutor() as pool:
        built = pool.submit(first.build)
        time.sleep(1.0)
        assert not built.done()
        monkeypatch.setattr(claims, "PATIENCE_SECONDS", 20.0)
        assert second.build() is None
        assert built.result(20) is not None
    assert "still waiting for 1 processes (the first is rank 1) to check their files of the source" in caplog.text


def test_what_outlives_a_dead_launch_puts_nothing_into_the_folder_of_the_next(tmp_path):
    out = tmp_path / "out"
    old_first, survivor, first, second = (Process(out, rank) for rank in (0, 1, 0, 1))
    survivor.goes_on.clear()
    with ThreadPoolExecutor() as pool:
        left = pool.submit(survivor.build)
        old_first.dies_after = survivor.waits
        die(old_first)
        again = pool.submit(first.build)
        assert first.waits.wait(20)  # so it has claimed the folder
        survivor.goes_on.set()
        with pytest.raises(CheckpointError, match="another launch has taken this conversion over"):
            left.result(20)
        assert not (tmp_path / ".out.converting" / "notes" / "1.json").exists()
        assert pool.submit(second.build).result(20) is None
        assert again.result(20) is not None
    assert second.made == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("code", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_told_and_worked_on(tmp_path, monkeypatch, caplog, code):
    refuse_locks(monkeypatch, getattr(errno, code))
    first, second = (Process(tmp_path / "out", rank) for rank in (0, 1))
    with ThreadPoolExecutor() as pool:
        other = pool.submit(second.build)
        assert first.build() is not None
        assert other.result(20) is None
    assert [float(load_file(tmp_path / "out" / f"f{i}")["x"][0]) for i in range(4)] == [0, 1, 2, 3]
    assert f"has no locks ({os.strerror(getattr(errno, code))})" in caplog.text


@pytest.mark.parametrize("stops_in", ["make", "finish"])
def test_without_locks_the_earlier_of_two_conversions_stops(tmp_path, monkeypatch, stops_in):
    refuse_locks(monkeypatch, errno.ENOLCK)
    earlier, later = Process(tmp_path / "out", 0, of=1), Process(tmp_path / "out", 0, of=1, words="another plan")
    reached, released = (earlier.waits, earlier.goes_on) if stops_in == "make" else (earlier.finishes, earlier.ends)
    released.clear()
    with ThreadPoolExecutor() as pool:
        left = pool.submit(earlier.build)
        assert reached.wait(20)
        later.goes_on.clear()
        again = pool.submit(later.build)
        assert later.waits.wait(20)  # so it has claimed the folder
        released.set()
        with pytest.raises(CheckpointError, match="another launch has taken this conversion over"):
            left.result(20)
        assert not (tmp_path / "out").exists()
        later.goes_on.set()
        assert again.result(20) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_any_other_refusal_of_the_lock_is_an_error(tmp_path, monkeypatch):
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(CheckpointError, match=f"cannot write .*{os.strerror(errno.EIO)}"):
        Process(tmp_path / "out", 0, of=1).build()


def refuse_locks(monkeypatch, code: int) -> None:
    def flock(handle: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(claims.fcntl, "flock", flock)
