"""Who works on a folder: the process that holds its lock, and the others of its launch, which know it by signs of life.

Processes may be on several machines and share nothing but the folder. A launch that was killed leaves its claim behind,
and the next one may have the same name; a file system may keep locks to one machine. So a claim counts only once it was
seen to come or to be touched: the first process touches it all the time, and a dead one never does.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moerl.errors import CheckpointError, ConfigError
from moerl.world import World

logger = logging.getLogger(__name__)

CLAIM, SEEN = "claim", "seen"
"""The launch at work, and a mark of each of its other processes that has come to know of it."""
PATIENCE_SECONDS = 1800.0
"""How long the first process waits without any file of another one becoming whole."""
PLAN_SECONDS = math.inf  # the first may hash its source for hours before; where it fails, the launcher ends the others
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What file systems say that have none: Lustre without `flock`, NFS without its lock service, FUSE."""
BEAT_SECONDS = 0.2
"""Between two touches of the claim."""


class Claim:
    """Of one process on the folder `root`, which is to become `out`."""

    def __init__(self, root: Path, out: Path, world: World) -> None:
        """`world`: which of how many processes of which launch this is."""
        self._path, self._marks = root / CLAIM, root / SEEN
        self._root, self._out, self._world = root, out, world
        self._text: str | None = None
        """Of the claim that counts for this process."""
        self._is_over = threading.Event()
        self._beat = threading.Thread(target=self._keep_touching, name="claim", daemon=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The first process's: one conversion at a time, and nothing left of an earlier claim.

        Raises:
            ConfigError: another conversion is at work.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._root / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            self._lock(handle)
            self._path.unlink(missing_ok=True)
            shutil.rmtree(self._marks, ignore_errors=True)
            self._marks.mkdir()
            try:
                yield
            finally:
                self.end()
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is converting into {self._out}; wait for it or choose another target"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%s: its file system has no locks (%s), so nothing refuses a second conversion into it while this one "
                "runs; the later one takes it over, and the earlier one then stops",
                self._out,
                error.strerror,
            )

    def announce(self) -> None:
        """The first process's, which has planned: from here on the others work."""
        self._text = f"{self._world.launch}\n{uuid.uuid4()}"
        write_whole(self._path, self._text)
        self._beat.start()

    def end(self) -> None:
        """No more signs of life; a second time does nothing."""
        self._is_over.set()
        if self._beat.ident is not None:
            self._beat.join()

    def await_first(self, is_planned: Callable[[], bool]) -> None:
        """Wait until the first process of this launch lives and `is_planned`, and tell it so.

        Raises:
            CheckpointError: it never did.
        """
        before = self._seen()

        def lives() -> bool:
            found = self._seen()
            if found is None or found == before or found[0].rpartition("\n")[0] != self._world.launch:
                return False
            self._text = found[0]
            return is_planned()

        wait_for(lives, f"the first process to plan {self._out}", PLAN_SECONDS)
        self.mark()

    def mark(self) -> None:
        """Tell the first process that this one knows of it; it may have finished with the folder by now."""
        with suppress(FileNotFoundError):
            (self._marks / str(self._world.rank)).touch()

    def await_others(self) -> None:
        """Until every other process has marked, for as long as it checks its share of the source; waiting long is told.

        Raises:
            CheckpointError: one never did.
        """
        others = [self._marks / str(rank) for rank in range(1, self._world.size)]
        told = time.monotonic()

        def are_here() -> bool:
            nonlocal told
            missing = [mark.name for mark in others if not mark.exists()]
            if missing and time.monotonic() > told + PATIENCE_SECONDS:
                told = time.monotonic()
                logger.warning(
                    "%s: still waiting for %d processes (the first is rank %s) to check their files of the source; "
                    "where one has ended, end this one too and start again",
                    self._out,
                    len(missing),
                    missing[0],
                )
            return not missing

        wait_for(are_here, f"all processes to see that {self._out} is being made", PLAN_SECONDS)

    @property
    def is_lost(self) -> bool:
        """Whether the folder is another launch's by now."""
        return text_of(self._path) != self._text

    def refuse_if_lost(self) -> None:
        """Before anything becomes part of the folder: a later launch may have taken it over from a dead one.

        Raises:
            CheckpointError: one has.
        """
        if self.is_lost:
            raise CheckpointError(
                f"{self._out}: stopped, since another launch has taken this conversion over; leave it to that one"
            )

    def _seen(self) -> tuple[str, int] | None:
        """The claim that is there, and when it was last touched (ns)."""
        text = text_of(self._path)
        with suppress(FileNotFoundError):
            return None if text is None else (text, self._path.stat().st_mtime_ns)
        return None

    def _keep_touching(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            with suppress(OSError):  # a sign that fails is one that comes later
                os.utime(self._path)


def text_of(path: Path) -> str | None:
    """None where there is none, or not any more."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def write_whole(path: Path, text: str) -> None:
    """There at once, or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


def wait_for(is_true: Callable[[], bool], what: str, seconds: float | None = None) -> None:
    """Until it is; `seconds` (None: `PATIENCE_SECONDS`) at most.

    Raises:
        CheckpointError: it never was; says `what` was waited for.
    """
    seconds = PATIENCE_SECONDS if seconds is None else seconds
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            raise CheckpointError(f"waited {seconds:.0f} s for {what}; see what the others say, and start again")
        time.sleep(0.02)
