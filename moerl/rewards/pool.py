"""A pool of sandboxed verifier processes. What runs inside, and behind which walls: `worker.py`, `sandbox.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from moerl.errors import RewardError
from moerl.rewards import worker

_LOG = logging.getLogger(__name__)

START_SECONDS = 120.0
"""For a fresh process, and for the first import of a judge (sympy on a loaded machine)."""
GRACE_SECONDS = 5.0
"""After a task's deadline, for the worker to report it; then the worker is replaced."""
EXPECTED_LAYERS = frozenset({"limits", "audit", "seccomp", "landlock", "namespaces"})

ErrorKind = Literal["", "timeout", "crash", "exception"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one task."""

    value: Any
    """JSON value of the function; None where it failed."""
    error: ErrorKind = ""
    """`timeout`, `crash` (the process died) or `exception`."""
    text: str = ""
    """Why it failed, for people."""
    seconds: float = 0.0
    """From when a worker started on it."""
    in_program: bool = False
    """Whether the function had said `sandbox.program_starts()` when it ended: what failed then is a stranger's program.
    False also where the worker was lost, whatever it was doing."""


@dataclass(frozen=True, slots=True)
class _Task:
    function: str
    timeout_seconds: float
    frame: bytes
    future: Future[Verdict]


class SandboxPool:
    """Runs `module:function` on JSON arguments in processes of its own. Safe to use from any thread and any event loop.

    Every task runs in a fresh fork of a worker that has the function imported, with an environment of its own, in a
    folder of its own, and is killed at its deadline. The deadline counts from when a worker starts the task, never
    the wait in the queue. Workers start on first use; they end with `close()`, or with this process.
    """

    def __init__(self, num_workers: int, timeout_seconds: float, memory_bytes: int) -> None:
        """`memory_bytes` bounds the address space of one task."""
        if num_workers < 1 or timeout_seconds <= 0 or memory_bytes < 2**26:
            raise RewardError(
                f"reward.num_workers={num_workers} must be at least 1, reward.timeout_seconds={timeout_seconds} above "
                f"0 and reward.memory_bytes={memory_bytes} at least {2**26}"
            )
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._memory_bytes = memory_bytes
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, function: str, kwargs: dict[str, Any], *, timeout_seconds: float | None = None) -> Future[Verdict]:
        """Queue one task. A function that fails gives a `Verdict` with an error.

        The future raises `RewardError` where no verdict is possible at all: no such function, or no process can start.
        """
        future: Future[Verdict] = Future()
        timeout = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            frame = worker.encode_frame({"function": function, "kwargs": kwargs, "timeout_seconds": timeout})
        except (TypeError, ValueError) as error:
            raise RewardError(f"verifier {function}: its arguments must be JSON values ({error})") from error
        with self._lock:
            if self._is_closed:
                raise RewardError("the verifier pool is closed; build a new scorer")
            if len(self._threads) < self._num_workers:
                thread = threading.Thread(target=self._serve, name=f"verifier-{len(self._threads)}", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._tasks.put(_Task(function, timeout, frame, future))
        return future

    async def run(self, function: str, kwargs: dict[str, Any], *, timeout_seconds: float | None = None) -> Verdict:
        """`submit`, awaited."""
        return await asyncio.wrap_future(self.submit(function, kwargs, timeout_seconds=timeout_seconds))

    def close(self) -> None:
        """Finish what is queued, then stop the workers. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """One thread for the whole life of one worker slot: a worker is killed when the thread that started it ends."""
        process: _WorkerProcess | None = None
        while (task := self._tasks.get()) is not None:
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                if process is not None and not process.is_alive():
                    lost, process = process, None
                    lost.stop()
                process = process or _WorkerProcess(self._memory_bytes)
                task.future.set_result(process.ask(task))
            except RewardError as error:
                task.future.set_exception(error)
            except Exception as error:  # noqa: BLE001  # who waits for the task must hear of it, and the next one is served
                lost, process = process, None
                if lost is not None:  # nobody knows how much of an answer is still in its pipe
                    lost.stop()
                task.future.set_exception(error)
        if process is not None:
            process.stop()


class _WorkerProcess:
    """One `worker.py`."""

    def __init__(self, memory_bytes: int) -> None:
        """Raises `RewardError` where it does not start; nothing is left open then."""
        self._known: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as opened:
            try:
                self._start(opened)
            except OSError as error:
                raise RewardError(
                    f"cannot start a verifier process with {sys.executable} ({error}); look at the space in the folder "
                    "for temporary files, and at the limits of open files and processes (ulimit -n -u)"
                ) from error
            paths = [str(Path(p or ".").absolute()) for p in sys.path]  # the worker runs in another folder
            hello = self._exchange(worker.encode_frame({"path": paths, "memory_bytes": memory_bytes}), START_SECONDS)
            if hello is None:
                raise RewardError(f"a verifier process did not start: {self._last_words()}")
            missing = sorted(EXPECTED_LAYERS - set(hello["layers"]))
            if missing:
                _LOG.warning("the verifier sandbox lacks these layers on this machine: %s", ", ".join(missing))
            self._opened = opened.pop_all()

    def _start(self, opened: contextlib.ExitStack) -> None:
        """What is to be undone goes on `opened`, the last first: its pipe closes, it ends, its files go."""
        home = opened.enter_context(tempfile.TemporaryDirectory(prefix="moerl-verifier-", ignore_cleanup_errors=True))
        self._stderr: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        opened.callback(self._end)
        with contextlib.ExitStack() as given:
            child_in, self._to_child = _pipe(given, opened)
            self._from_child, child_out = _pipe(opened, given)
            script = [str(Path(worker.__file__)), str(child_in), str(child_out)]
            single_threaded = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-X", "utf8", *script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                cwd=home,
                # some libraries insist on a folder for their caches
                env={"LANG": "C.UTF-8", "HOME": home, "TMPDIR": home, **single_threaded},
                pass_fds=(child_in, child_out),
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process is not None and self._process.poll() is None

    def ask(self, task: _Task) -> Verdict:
        """One task. The worker keeps the deadline; only one that does not answer at all is killed from here."""
        start = time.monotonic()
        first_use = 0.0 if task.function in self._known else START_SECONDS
        reply = self._exchange(task.frame, task.timeout_seconds + GRACE_SECONDS + first_use)
        if reply is None:
            text = self._last_words()
            self.stop()
            return Verdict(None, "crash", f"the verifier process was lost: {text}", time.monotonic() - start)
        if reply.get("error") == "broken":
            raise RewardError(f"verifier {task.function} cannot be imported: {reply['text'].strip()}")
        self._known.add(task.function)
        error, text = reply.get("error", ""), reply.get("text", "")
        return Verdict(reply.get("value"), error, text, reply["seconds"], reply.get("in_program", False))

    def stop(self) -> None:
        """End the process. May be called twice."""
        self._opened.close()

    def _end(self) -> None:
        """It leaves by itself when its pipe closes."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exchange(self, frame: bytes, limit_seconds: float) -> dict[str, Any] | None:
        """The reply, or None where the process is gone or silent."""
        assert self._process is not None
        ready = select.poll()  # `select` knows no descriptor above 1023, and a trainer may have as many
        ready.register(self._from_child, select.POLLIN)
        try:
            worker.write_frame(self._to_child, frame)
            if not ready.poll(limit_seconds * 1000):
                self._process.kill()
                return None
            return worker.read_frame(self._from_child)
        except (EOFError, BrokenPipeError):
            return None

    def _last_words(self) -> str:
        """How it ended, and the end of its stderr."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            status = None
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 500))
        return f"status {status}; {self._stderr.read().decode(errors='replace').strip() or 'it wrote nothing'}"


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with these."""
    reading, writing = os.pipe()
    reader.callback(os.close, reading)
    writer.callback(os.close, writing)
    return reading, writing
