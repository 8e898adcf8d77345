"""Signs of life between ranks: a rank that dies or falls silent ends the run everywhere, with one message.

A thread of every rank writes once a second into the launcher's store where its rank is. Rank 0 reads all of them, the
others read rank 0's. Whoever finds a rank lost, or fails itself, claims the one place for a fault; all others see it
there, say nothing and end with the same status. A thread ends the process, because the main thread may be inside an
exchange that nobody will answer.

Over gloo such an exchange ends with an error in the main thread (`Watch.explain`). Over NCCL the main thread waits for
the GPU, and torch ends the process from a thread of its own, without a word of who is missing; there each rank reports
before that, once its main thread has stood in one place for nearly as long as an exchange may take.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moerl.errors import EXIT_FAILED, PeerError
from moerl.mcore.standstill import Standstill
from moerl.world import World

MAX_BEAT_SECONDS = 1.0
GRACE_SECONDS = 4.0
"""After a fault is known, for the main thread to end by itself."""
BLAME_SECONDS = 10.0
"""After an exchange failed, for the signs of life to show who is lost."""
MARGIN_SECONDS = 30.0
"""By which a standstill is told before torch ends an exchange (at most a tenth of what that may take)."""
FAULT, BYE = "fault", "bye"


@dataclass
class _Seen:
    """The last sign of one rank."""

    text: str
    at: float


class Watch:
    """One rank's thread; `close` it before the process ends well."""

    def __init__(
        self,
        store: Store,
        world: World,
        silence_seconds: float,
        *,
        exchange_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Made by the main thread.

        Args:
            store: a connection of its own, so that nothing the main thread waits for holds up the signs.
            world: this rank among the others.
            silence_seconds: after which a rank without a sign is lost.
            exchange_seconds: after which torch ends a process that waits in an exchange; None where it does not.
            clock: seconds that only grow.
        """
        self._clock = clock
        self._standstill = Standstill()
        self._limit = None
        if exchange_seconds is not None:
            self._limit = exchange_seconds - min(MARGIN_SECONDS, exchange_seconds / 10)
        self._store = store
        self._world = world
        self._silence = silence_seconds
        self._seconds = min(MAX_BEAT_SECONDS, silence_seconds / 5)
        self._place: dict[str, Any] = {"pid": os.getpid(), "host": _pid_space(), "step": 0, "phase": "start"}
        self._place |= {"entered": 0, "since": time.time(), "has_failed": False}
        self._count = 0
        self._seen: dict[int, _Seen] = {}
        self._closing = threading.Event()
        self._failed: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._beat()

    def start(self) -> None:
        """Once every rank has made its watch."""
        self._thread.start()

    def begin(self, step: int) -> None:
        """This rank is at `step`."""
        self._place = {**self._place, "step": step}

    def phase(self, name: str) -> None:
        """And in this part of it."""
        entered = self._place["entered"] + 1
        self._place = {**self._place, "phase": name, "entered": entered, "since": time.time()}

    def patient(self) -> AbstractContextManager[None]:
        """While the main thread waits for rank 0 outside of any exchange, however long that takes."""
        return self._standstill.patient()

    def where(self) -> str:
        """This rank's place, for people."""
        return _where(self._place)

    def refuse_fault(self) -> None:
        """Raise `PeerError` where another rank has failed."""
        if self._failed is not None:
            raise PeerError(self._failed["status"])

    def claim(self, text: str, status: int) -> int | None:
        """None where this rank is the first to report a fault, and so tells it; else the exit status of the first."""
        mine = json.dumps({"rank": self._world.rank, "text": text, "status": status})
        first = bytes(self._store.compare_set(FAULT, "", mine)).decode()
        return None if first == mine else json.loads(first)["status"]

    def explain(self, error: BaseException) -> PeerError:
        """Of an exchange that failed: wait for the fault behind it, or else report who is behind."""
        self._place = {**self._place, "has_failed": True}
        patience = BLAME_SECONDS if self._world.rank == 0 else 1.5 * BLAME_SECONDS
        end = time.monotonic() + patience
        while self._failed is None and time.monotonic() < end:
            time.sleep(0.1)
        if self._failed is None:
            self._report(f"{self._behind()} ({str(error).splitlines()[0]})")
        return PeerError(EXIT_FAILED if self._failed is None else self._failed["status"])

    def close(self, *, is_well: bool) -> None:
        """Stop; `is_well` says goodbye first, so that nobody takes this rank for lost."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if is_well:
            self._place = {**self._place, "phase": BYE}
            self._beat()

    # The thread

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            try:
                still = self._stand()
                self._beat()
                self._failed = self._fault() or self._look() or self._overdue(still)
            except (dist.DistError, RuntimeError, OSError):
                self._failed = self._without_store()
            if self._failed is not None:
                self._end(self._failed["status"])
                return

    def _beat(self) -> None:
        self._count += 1
        seen = {"at": self._standstill.place, "is_patient": self._standstill.is_patient, "count": self._count}
        self._store.set(str(self._world.rank), json.dumps({**self._place, **seen}))

    def _stand(self) -> float:
        """Look where the main thread is; for how many seconds it has been there."""
        return self._standstill.look(self._clock(), self._place["phase"], self._place["entered"])

    def _overdue(self, still: float) -> dict[str, Any] | None:
        """The fault of an exchange that torch is about to end with this process; None where none is due."""
        if self._limit is None or still < self._limit:
            return None
        signs = {rank: json.loads(text) for rank, text in self._signs(range(self._world.size)).items()}
        if all(sign["is_patient"] or sign["phase"] == BYE for rank, sign in signs.items() if rank != self._world.rank):
            return None  # this rank has a long work of its own: nobody waits with it in an exchange
        self._report(_stalled(signs, still) or self._behind())
        return self._fault()

    def _fault(self) -> dict[str, Any] | None:
        return json.loads(self._store.get(FAULT)) if self._store.check([FAULT]) else None

    def _look(self) -> dict[str, Any] | None:
        """Find ranks that are lost; the fault where there are any."""
        watched = range(1, self._world.size) if self._world.rank == 0 else [0]
        signs = self._signs(watched)
        now = time.monotonic()
        lost = []
        for rank, text in signs.items():
            if rank not in self._seen or self._seen[rank].text != text:
                self._seen[rank] = _Seen(text, now)
            sign, silent = json.loads(text), now - self._seen[rank].at
            if sign["phase"] == BYE:
                continue
            if _is_gone(sign):
                lost.append(f"rank {rank} died {_where(sign)}")
            elif silent > self._silence:
                lost.append(f"rank {rank} gave no sign of life for {silent:.0f} s; it was last seen {_where(sign)}")
        if not lost:
            return None
        self._report("; ".join(lost))
        return self._fault()

    def _signs(self, ranks: Iterable[int]) -> dict[int, str]:
        keys = [str(rank) for rank in ranks]
        return {int(key): bytes(text).decode() for key, text in zip(keys, self._store.multi_get(keys), strict=True)}

    def _behind(self) -> str:
        """Who the others wait for, as far as phases tell."""
        signs = {rank: json.loads(text) for rank, text in self._signs(range(self._world.size)).items()}
        least = min(sign["entered"] for sign in signs.values())
        behind = {rank: sign for rank, sign in signs.items() if sign["entered"] == least}
        if len(behind) == len(signs):
            own = self._world.rank
            others = {rank: sign for rank, sign in signs.items() if rank != own and not sign["has_failed"]}
            standing = f", with {_standing(others)}" if others else ""
            return f"an exchange between the ranks failed {_where(signs[0])}{standing}"
        listed = ", ".join(f"rank {rank} {_where(sign)}" for rank, sign in behind.items())
        seconds = max(time.time() - sign["since"] for sign in behind.values())
        return f"the others waited in vain for {listed}, for {seconds:.0f} s"

    def _report(self, text: str) -> None:
        if self.claim(text, EXIT_FAILED) is None:
            say(f"{text}; every rank ends. Complete checkpoints are untouched: start the same command to go on")

    def _without_store(self) -> dict[str, Any]:
        if self._world.local_rank == 0:
            say(f"rank {self._world.rank} lost its launcher {self.where()} and ends; start the same command to go on")
        return {"status": EXIT_FAILED}

    def _end(self, status: int) -> None:
        if self._closing.wait(GRACE_SECONDS):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _stalled(signs: dict[int, dict[str, Any]], still: float) -> str | None:
    """Where ranks stand that are all in one phase; None where one is behind."""
    if len({sign["entered"] for sign in signs.values()}) > 1:
        return None
    where = _where(next(iter(signs.values())))
    return f"an exchange between the ranks did not end {where} for {still:.0f} s: {_standing(signs)}"


def _standing(signs: dict[int, dict[str, Any]]) -> str:
    """Which ranks stand where, the fewest together first."""
    ranks_at: dict[str, list[int]] = {}
    for rank, sign in signs.items():
        ranks_at.setdefault(sign["at"], []).append(rank)
    fewest_first = sorted(ranks_at.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{_ranks(ranks)} at {at or 'an unknown place'}" for at, ranks in fewest_first)


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    listed = ", ".join("-".join(str(end) for end in run) for run in runs)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _where(sign: dict[str, Any]) -> str:
    return f"in phase {sign['phase']!r} of step {sign['step']}" if sign["step"] else f"in phase {sign['phase']!r}"


def _is_gone(sign: dict[str, Any]) -> bool:
    """Whether the process of a rank on this machine is no more."""
    if sign["host"] != _pid_space():
        return False
    try:
        os.kill(sign["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, and is another user's
        return False
    return False


def _pid_space() -> str:
    """Where a process id means the same process: containers and machines may share a host name, and have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no such files: at least the machine
        return socket.gethostname()


def say(text: str) -> None:
    """One line for the person, whatever the log levels."""
    sys.stderr.write(f"moerl: {text}\n")
    sys.stderr.flush()
