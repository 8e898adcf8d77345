"""`trace.json`: what ran when, in Chrome's trace format; open it in Perfetto or chrome://tracing.

The file is whole JSON after every event, so that a run killed at any moment leaves one that loads: an event replaces
the closing bracket in one write. It is bounded: a full file becomes `trace.1.json` in place of the one before, and a
new one is begun. A run that goes on adds to its file; times are those of the wall clock, so that the pause is seen.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moerl.analysis.run_folder import OLD_TRACE_FILE, TRACE_FILE

logger = logging.getLogger(__name__)

LEARNER, ROLLOUT = 1, 2
"""Processes of the trace."""
STEPS, PHASES = 1, 2
"""Threads of the learner."""
_NAMES = ((LEARNER, STEPS, "steps"), (LEARNER, PHASES, "phases"))
_END = b"\n]\n"


class Trace:
    """Writes the file; safe to use from any thread. The file is made with the first event."""

    def __init__(self, folder: Path, max_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`max_bytes` 0 writes nothing; `clock` is that of the times that the methods are given."""
        self._path, self._old = folder / TRACE_FILE, folder / OLD_TRACE_FILE
        self._max_bytes = max_bytes
        self._origin = time.time() - clock()
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._end = 0
        """Where the closing bracket is."""
        self._is_empty = True
        self._lanes: list[float] = []
        """When the last group of each lane ended."""
        self._is_off = max_bytes <= 0

    def phase(self, name: str, start: float, end: float) -> None:
        """A part of a step on the learner's side."""
        self._add(name, LEARNER, PHASES, start, end, {})

    def step(self, step: int, start: float, end: float) -> None:
        """A whole step."""
        self._add(f"step {step}", LEARNER, STEPS, start, end, {})

    def group(self, name: str, start: float, end: float, said: Mapping[str, Any]) -> None:
        """A group of episodes; those that overlap are put on lanes of their own."""
        with self._lock:
            fitting = (i for i, free in enumerate(self._lanes) if free <= start)
            # the one that was busy last: by ends in ascending order that takes as few lanes as groups overlap at once
            lane = max(fitting, key=self._lanes.__getitem__, default=len(self._lanes))
            if lane == len(self._lanes):
                self._lanes.append(end)
            self._lanes[lane] = end
        self._add(name, ROLLOUT, lane, start, end, said)

    def close(self) -> None:
        """Close the file; what comes later is not written."""
        with self._lock:
            self._is_off = True
            self._shut()

    def _add(self, name: str, process: int, thread: int, start: float, end: float, said: Mapping[str, Any]) -> None:
        event = {"name": name, "ph": "X", "pid": process, "tid": thread, **self._times(start, end), "args": dict(said)}
        with self._lock:
            if self._is_off:
                return
            try:
                if self._end > self._max_bytes:
                    self._shut()
                    self._path.replace(self._old)
                self._open()
                self._write(event)
            except OSError as error:
                logger.warning("%s: cannot be written (%s); the run goes on without it", self._path, error.strerror)
                self._is_off = True

    def _times(self, start: float, end: float) -> dict[str, int]:
        return {"ts": round((start + self._origin) * 1e6), "dur": round((end - start) * 1e6)}

    def _open(self) -> None:
        if self._handle is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        kept = _whole_events(self._path.read_bytes())
        os.ftruncate(self._handle, len(kept))
        self._end, self._is_empty = len(kept), len(kept) <= 1
        if not self._is_empty:
            return
        os.pwrite(self._handle, b"[" + _END, 0)
        self._end = 1
        for process, name in ((LEARNER, "learner"), (ROLLOUT, "rollout: a group on each lane")):
            self._write({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for process, thread, name in _NAMES:
            self._write({"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}})

    def _write(self, event: Mapping[str, Any]) -> None:
        assert self._handle is not None
        data = (b"\n" if self._is_empty else b",\n") + json.dumps(event).encode()
        os.pwrite(self._handle, data + _END, self._end)
        self._end += len(data)
        self._is_empty = False

    def _shut(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None


def _whole_events(data: bytes) -> bytes:
    """The opening bracket and every whole event, without the closing bracket; b"" where there is nothing to keep."""
    lines = data.split(b"\n")
    kept = [lines[0]] if lines[0] == b"[" else []
    for line in lines[1:] if kept else []:
        event = line.removesuffix(b",")
        if not (event.startswith(b"{") and _is_json(event)):
            break
        kept.append(event)
    return b"[\n" + b",\n".join(kept[1:]) if len(kept) > 1 else b""


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
