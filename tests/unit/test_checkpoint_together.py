"""CheckpointStore in the background, and of several ranks: here threads that share a folder, as processes do."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import save_file
from torch import ones

from moerl.checkpoint import LEARNER, CheckpointStore
from moerl.errors import CheckpointError, RolloutError


class RankPolicy:
    """One rank's part: a tensor file and a text file that tells the step; `gate` holds the writing up."""

    def __init__(self, step, rank=0, gate=None, error=None):
        self.step = step
        self.rank = rank
        self.gate = gate
        self.error = error

    def begin_save(self, folder):
        step = self.step

        def write():
            if self.gate is not None:
                assert self.gate.wait(20)
            if self.error is not None:
                raise self.error
            save_file({"w": ones(64) * step}, folder / f"rank_{self.rank:05d}.safetensors")
            (folder / f"rank_{self.rank:05d}.json").write_text(json.dumps({"step": step}))

        return write

    def save(self, folder):
        self.begin_save(folder)()


class Threads:
    """The meeting places of a team whose ranks are threads."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.flags = [False] * size

    def member(self, rank):
        return Member(self, rank)


class Member:
    def __init__(self, team, rank):
        self.team = team
        self.rank = rank
        self.size = team.size
        self.is_leader = rank == 0

    def meet(self):
        self.team.barrier.wait()

    def any(self, flag):
        self.team.flags[self.rank] = flag
        self.meet()
        answer = any(self.team.flags)
        self.meet()
        return answer


def store_of(folder, **options):
    return CheckpointStore(folder, keep=2, model_id="a" * 64, **options)


def in_ranks(folder, size, story, **options):
    """Run `story(rank, store)` in every rank; what each returned or raised."""
    team = Threads(size)

    def one(rank):
        try:
            return story(rank, store_of(folder, team=team.member(rank), **options))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_training_goes_on_while_a_save_is_written(tmp_path):
    store = store_of(tmp_path, in_background=True)
    store.save(1, RankPolicy(1), {"step": 1})
    store.wait()
    gate = threading.Event()
    policy, state = RankPolicy(2, gate=gate), {"step": 2, "list": [1]}
    store.save(2, policy, state)
    policy.step, state["list"] = 99, "changed"  # the copy does not see what training changes
    assert store.steps() == [1]
    assert store.latest(on_corrupt="refuse").step == 1
    gate.set()
    store.wait()
    assert store.steps() == [1, 2]
    found = store.open(2)
    assert found.loop_state() == {"step": 2, "list": [1]}
    assert json.loads((found.learner / "rank_00000.json").read_text()) == {"step": 2}


def test_the_next_save_waits_for_the_one_before(tmp_path):
    store = store_of(tmp_path, in_background=True)
    gate = threading.Event()
    store.save(1, RankPolicy(1, gate=gate), {"step": 1})
    threading.Timer(0.2, gate.set).start()
    store.save(2, RankPolicy(2), {"step": 2})
    assert store.open(1).step == 1
    store.wait()
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RolloutError("boom")])
def test_what_fails_in_the_background_is_raised_by_the_next_call(tmp_path, error):
    store = store_of(tmp_path, in_background=True)
    store.save(1, RankPolicy(1), {"step": 1})
    store.save(2, RankPolicy(2, error=error), {"step": 2})
    told = CheckpointError if isinstance(error, OSError) else RolloutError
    with pytest.raises(told, match=r"No space left on device|boom"):
        store.save(3, RankPolicy(3), {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    store.save(3, RankPolicy(3), {"step": 3})
    store.wait()
    assert store.steps() == [1, 3]


def test_leaving_waits_and_an_error_of_the_run_is_the_one_told(tmp_path):
    with store_of(tmp_path, in_background=True) as store:
        store.save(1, RankPolicy(1), {"step": 1})
    assert store.steps() == [1]
    gate = threading.Event()
    threading.Timer(0.2, gate.set).start()

    def run():
        with store:
            store.save(2, RankPolicy(2, gate=gate), {"step": 2})
            raise RolloutError("boom")

    with pytest.raises(RolloutError, match="boom"):
        run()
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("in_background", [False, True])
def test_all_ranks_write_one_checkpoint(tmp_path, in_background):
    def story(rank, store):
        for step in (1, 2, 3):
            store.save(step, RankPolicy(step, rank), {"step": step} if rank == 0 else {})
        store.wait()
        return store.steps()

    assert in_ranks(tmp_path, 3, story, in_background=in_background) == [[2, 3]] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    found = store_of(tmp_path).open(3)
    parts = {f"{LEARNER}/rank_{rank:05d}.{kind}" for rank in range(3) for kind in ("json", "safetensors")}
    assert set(found.manifest["files"]) == parts | {"loop.json"}
    assert {path.relative_to(found.folder).as_posix() for path in found.folder.rglob("*.*")} == parts | {
        "loop.json",
        "manifest.json",
    }


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("failing", [0, 2])
def test_what_fails_on_one_rank_fails_on_all(tmp_path, in_background, failing):
    def story(rank, store):
        store.save(1, RankPolicy(1, rank), {"step": 1})
        error = OSError(28, "No space left on device") if rank == failing else None
        store.save(2, RankPolicy(2, rank, error=error), {"step": 2})
        store.wait()

    outcomes = in_ranks(tmp_path, 3, story, in_background=in_background)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert "No space left on device" in str(outcomes[failing])
    assert "No space left on device" in str(outcomes[0])
    assert "another rank failed, see its message" in str(outcomes[1])
    assert store_of(tmp_path).latest(on_corrupt="refuse").step == 1
    assert not list(tmp_path.glob(".partial*/**/manifest.json"))


def test_a_rank_that_never_writes_its_part_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("moerl.checkpoint.PATIENCE_SECONDS", 0.3)

    def story(rank, store):
        gate = threading.Event()
        if rank == 1:
            threading.Timer(1.0, gate.set).start()
        store.save(1, RankPolicy(1, rank, gate=gate if rank == 1 else None), {"step": 1})

    outcomes = in_ranks(tmp_path, 2, story)
    assert "rank 1 has not written its part" in str(outcomes[0])
    assert store_of(tmp_path).steps() == []
