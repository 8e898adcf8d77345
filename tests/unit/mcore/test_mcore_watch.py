"""Who is named when an exchange does not end, where torch would end the process without a word; on stand-in clocks."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from moerl.errors import EXIT_FAILED
from moerl.world import World

TIMEOUT = 1800.0
DUE = TIMEOUT - 30


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Rank:
    """One rank: a thread in the place of its main thread, and its watch, whose own thread is not started."""

    watch: Any

    def __init__(self, store, rank, size, clock, *, at="mcore.step", inside=None, exchange_seconds=TIMEOUT):
        self._leave = threading.Event()
        self._turn = threading.Lock()
        self._turn.acquire()
        made = threading.Event()
        place: dict[str, Any] = {"__name__": f"moerl.{at}"}
        exec("def stand(wait):\n    wait()\n", place)
        library: dict[str, Any] = {"__name__": inside, "wait": self._turn.acquire}
        exec("def synchronize():\n\n    wait()\n", library)
        wait = self._turn.acquire if inside is None else library["synchronize"]

        def main():
            from moerl.mcore.watch import Watch

            self.watch = Watch(store, World(rank, size), 60, exchange_seconds=exchange_seconds, clock=clock)
            made.set()
            while not self._leave.is_set():
                place["stand"](wait)

        self._thread = threading.Thread(target=main, daemon=True)
        self._thread.start()
        assert made.wait(30)

    def enter(self, phase, step=5):
        self.watch.begin(step)
        self.watch.phase(phase)

    def tick(self):
        """What the watch's thread does in each round; the fault that it finds, if any."""
        still = self.watch._stand()
        self.watch._beat()
        return self.watch._fault() or self.watch._overdue(still)

    def close(self):
        self._leave.set()
        self._turn.release()
        self._thread.join()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def team(clock):
    """Makes ranks, and ends their threads."""
    made = []

    def make(size, **options):
        store = HashStore()
        places = options.pop("places", ["mcore.step"] * size)
        made.extend(Rank(store, rank, size, clock, at=places[rank], **options) for rank in range(size))
        return made

    yield make
    for rank in made:
        rank.close()


def rounds(clock, ranks, seconds, step=1.0):
    """Time passes; the faults found on the way, in order."""
    for _ in range(int(seconds / step)):
        clock.now += step
        found = [fault for fault in (rank.tick() for rank in ranks) if fault is not None]
        if found:
            return found
    return []


def settle(ranks):
    """Until every stand-in thread is where it waits."""
    for rank in ranks:
        for _ in range(1000):
            rank.tick()
            if rank.watch._standstill.place.endswith(("(stand)", "(synchronize)")):
                break
            threading.Event().wait(0.01)


def enter_all(ranks, phase):
    for rank in ranks:
        rank.enter(phase)


def test_who_is_behind_is_named_before_torch_ends_the_process(team, clock, capsys):
    ranks = team(3)
    enter_all(ranks, "score")
    for rank in ranks[:2]:
        rank.enter("update")
    settle(ranks)
    assert rounds(clock, ranks, DUE - 10) == []
    found = rounds(clock, ranks, 20)
    assert found
    assert "the others waited in vain for rank 2 in phase 'score' of step 5, for" in found[0]["text"]
    assert found[0]["status"] == EXIT_FAILED
    assert clock.now - 100 < TIMEOUT
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1
    assert "every rank ends. Complete checkpoints are untouched" in lines[0]


def test_in_one_phase_every_rank_is_told_with_the_place_where_it_stands(team, clock):
    ranks = team(4, places=["mcore.optim", "mcore.optim", "mcore.step", "mcore.optim"])
    enter_all(ranks, "update")
    settle(ranks)
    (fault, *_) = rounds(clock, ranks, DUE + 10)
    assert fault["text"] == (
        f"an exchange between the ranks did not end in phase 'update' of step 5 for {DUE:.0f} s: "
        "rank 2 at moerl.mcore.step:2 (stand); ranks 0-1, 3 at moerl.mcore.optim:2 (stand)"
    )


def test_a_short_timeout_leaves_a_tenth_of_itself(team, clock):
    ranks = team(2, exchange_seconds=50)
    enter_all(ranks, "update")
    settle(ranks)
    assert rounds(clock, ranks, 44) == []
    assert rounds(clock, ranks, 5)


@pytest.mark.parametrize("phase", ["start", "rollout", "evaluate"])
def test_phases_in_which_rank_0_may_be_slow_are_never_overdue(team, clock, phase):
    ranks = team(2)
    if phase != "start":
        enter_all(ranks, phase)
    settle(ranks)
    assert rounds(clock, ranks, 3 * TIMEOUT, step=50) == []


def test_waiting_for_rank_0_outside_of_an_exchange_is_never_overdue(team, clock):
    """Rank 0 samples, then writes one file for an hour, and has not come to where the others wait for it."""
    ranks = team(3)
    enter_all(ranks, "rollout")
    with ExitStack() as waiting:
        for rank in ranks[1:]:
            waiting.enter_context(rank.watch.patient())
        for rank in ranks[1:]:
            rank.enter("share")
        settle(ranks)
        assert rounds(clock, ranks, 3 * TIMEOUT, step=50) == []
        for phase in ("share", "export"):
            ranks[0].enter(phase)
        assert rounds(clock, ranks, 3 * TIMEOUT, step=50) == []
    # from here on they wait in an exchange
    assert rounds(clock, ranks, DUE + 10)


def test_a_long_phase_whose_main_thread_moves_is_never_overdue(team, clock, monkeypatch):
    """An update may have more work than one exchange may take seconds."""
    from moerl.mcore import standstill

    ranks = team(2)
    enter_all(ranks, "update")
    settle(ranks)
    seen = standstill._stack
    monkeypatch.setattr(standstill, "_stack", lambda frame: ((seen(frame)[0], int(clock.now) // 100), "moved"))
    assert rounds(clock, ranks, 3 * TIMEOUT, step=50) == []


def test_over_gloo_nothing_is_overdue(team, clock):
    """There an exchange ends with an error in the main thread, which is exact."""
    ranks = team(2, exchange_seconds=None)
    enter_all(ranks, "update")
    settle(ranks)
    assert rounds(clock, ranks, 3 * TIMEOUT, step=50) == []


def test_over_gloo_a_failed_exchange_tells_where_those_stand_that_failed_in_none(team, monkeypatch):
    """All are in one phase. Rank 3 waited in vain as well."""
    from moerl.mcore import watch

    monkeypatch.setattr(watch, "BLAME_SECONDS", 0)
    ranks = team(4, places=["mcore.step", "mcore.optim", "mcore.optim", "mcore.step"], exchange_seconds=None)
    enter_all(ranks, "update")
    ranks[3].watch._failed = {"status": EXIT_FAILED}  # nothing to report any more
    ranks[3].watch.explain(RuntimeError("Timed out"))
    settle(ranks)
    ranks[0].watch.explain(RuntimeError("Timed out\nmore"))
    assert ranks[0].watch._fault()["text"] == (
        "an exchange between the ranks failed in phase 'update' of step 5, "
        "with ranks 1-2 at moerl.mcore.optim:2 (stand) (Timed out)"
    )


def test_a_new_phase_is_a_new_place(team, clock):
    ranks = team(2)
    for phase in ("score", "update", "publish", "probe"):
        enter_all(ranks, phase)
        settle(ranks)
        assert rounds(clock, ranks, DUE - 10, step=10) == []


def test_a_rank_that_ended_well_is_waited_for_by_nobody(team, clock):
    ranks = team(2)
    enter_all(ranks, "checkpoint")
    settle(ranks)
    ranks[1].watch.close(is_well=True)
    assert rounds(clock, ranks[:1], 3 * TIMEOUT, step=50) == []


def test_a_place_inside_of_a_library_is_told_with_the_line_of_moerl_that_called_it(team):
    (rank,) = team(1, inside="torch.cuda")
    settle([rank])
    assert rank.watch._standstill.place == "moerl.mcore.step:2 (stand) in torch.cuda:3 (synchronize)"


def test_no_frame_and_so_no_tensor_is_kept(team):
    (rank,) = team(1)
    settle([rank])
    sign = json.loads(rank.watch._store.get("0"))
    assert sign["at"] == "moerl.mcore.step:2 (stand)"
    stack = rank.watch._standstill._stack
    kinds = {type(part) for _, places in [stack] for pair in places for part in pair}
    assert {kind.__name__ for kind in kinds} == {"code", "int"}
