"""Main program of a verifier process: `python -I worker.py <in fd> <out fd>`. Standard library only; run by `pool.py`.

The worker itself never looks at a model's text. It imports the judges once, then forks one child per task, so that
nothing a task does to its process outlives it and a task that must be killed costs a fork, not an import of sympy.
Frames are a length (4 bytes, big-endian) and JSON; nothing is unpickled.

    in   {"path": [...], "memory_bytes": n}                              first frame
    out  {"layers": [...]}
    in   {"function": "module:name", "kwargs": {...}, "timeout_seconds": x}
    out  {"value": ..., "seconds": x} or {"error": timeout | crash | exception | broken, "text": ..., "seconds": x},
         with "in_program": true where a stranger's program had begun
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

MAX_REPLY_BYTES = 1 << 20
PROBE = "moerl.rewards.sandbox:layers_of_task"
_MAX_DEPTH = 200
_EXIT_GRACE_SECONDS = 0.2
_STARTS = b'\x00\x00\x00\x08"starts"'
"""From a task to its worker, before its reply: a stranger's program begins. In the pipe before that program is."""


def read_frame(fd: int) -> Any:
    """The next frame's value; raises EOFError where the other side is gone."""
    size = int.from_bytes(_read_exactly(fd, 4), "big")
    return json.loads(_read_exactly(fd, size))


def encode_frame(value: Any) -> bytes:
    """The bytes of one frame; raises TypeError or ValueError where the value is no JSON."""
    data = json.dumps(value).encode()
    return len(data).to_bytes(4, "big") + data


def write_frame(fd: int, frame: bytes) -> None:
    """Send one frame."""
    while frame:
        frame = frame[os.write(fd, frame) :]


def _read_exactly(fd: int, size: int) -> bytes:
    chunks = []
    while size:
        chunk = os.read(fd, min(size, 1 << 16))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def main(inbox: int, outbox: int) -> None:
    """Serve requests until the pool closes its end."""
    first = read_frame(inbox)
    sys.path[:] = first["path"]
    from moerl.rewards import sandbox

    sandbox.die_with_parent()
    layers = sandbox.wall_in_worker()
    calls = sandbox.call_filter()
    run = TaskRunner(memory_bytes=first["memory_bytes"], filter_calls=calls, inherited=(inbox, outbox))
    trial = run({"function": PROBE, "kwargs": {}, "timeout_seconds": 60.0})
    if "value" not in trial:
        sys.exit(f"a trial task failed: {trial['error']}: {trial['text']}")
    write_frame(outbox, encode_frame({"layers": layers + trial["value"]}))
    while True:
        try:
            request = read_frame(inbox)
        except EOFError:
            return
        write_frame(outbox, encode_frame(run(request)))


class TaskRunner:
    """Forks one walled child per request and waits for its verdict, at most until the deadline."""

    def __init__(self, *, memory_bytes: int, filter_calls: Any, inherited: tuple[int, ...]) -> None:
        self._memory_bytes = memory_bytes
        self._filter_calls = filter_calls
        self._inherited = inherited
        self._functions: dict[str, Callable[..., Any]] = {}

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply frame to one request frame."""
        name, timeout = request["function"], float(request["timeout_seconds"])
        if name not in self._functions:
            try:
                self._functions[name] = load_function(name)
            except Exception:  # noqa: BLE001  # whatever breaks the import is the caller's news, not the end of the worker
                return {"error": "broken", "text": traceback.format_exc(limit=-3), "seconds": 0.0}
        start = time.monotonic()
        inbox, outbox = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(inbox)
            self._run_child(self._functions[name], request["kwargs"], timeout, outbox)
        os.close(outbox)
        try:
            reply = self._await_reply(child, inbox, start + timeout, timeout)
        finally:
            os.close(inbox)
        return {**reply, "seconds": time.monotonic() - start}

    def _run_child(self, function: Callable[..., Any], kwargs: dict[str, Any], timeout: float, outbox: int) -> None:
        """Never returns: the child ends here, whatever happens."""
        status = 1
        try:
            os.setsid()
            for fd in self._inherited:
                os.close(fd)
            write_frame(outbox, encode_frame(self._call_walled(function, kwargs, timeout, outbox)))
            status = 0
        finally:
            os._exit(status)

    def _call_walled(
        self, function: Callable[..., Any], kwargs: dict[str, Any], timeout: float, outbox: int
    ) -> dict[str, Any]:
        from moerl.rewards import sandbox

        logging.disable(logging.CRITICAL)
        sandbox.when_program_starts(lambda: write_frame(outbox, _STARTS))
        try:
            sandbox.die_with_parent()
            sandbox.wall_in_task(
                memory_bytes=self._memory_bytes, cpu_seconds=math.ceil(timeout) + 1, filter_calls=self._filter_calls
            )
            value = function(**kwargs)
            json.dumps(value)
        except BaseException as error:  # noqa: BLE001  # a verifier's failure, sys.exit included, marks one trajectory
            return {"error": "exception", "text": f"{type(error).__name__}: {str(error)[:500]}"}
        return {"value": value}

    def _await_reply(self, child: int, inbox: int, deadline: float, timeout: float) -> dict[str, Any]:
        data = b""
        late = False
        while not _is_whole(_reply_part(data)):
            late = not select.select([inbox], [], [], max(0.0, deadline - time.monotonic()))[0]
            chunk = b"" if late else os.read(inbox, 1 << 16)
            if not chunk or len(data) > MAX_REPLY_BYTES:
                break
            data += chunk
        reply = _reply_part(data)
        status = _reap(child, wait_seconds=0.0 if late or reply else _EXIT_GRACE_SECONDS)
        verdict = _verdict(reply, f"no verdict after {timeout:g} s" if late else "", status)
        return {**verdict, "in_program": data.startswith(_STARTS)}


def _reply_part(data: bytes) -> bytes:
    """Behind the word that a program begins, where that was said or is on its way."""
    return b"" if _STARTS.startswith(data) else data.removeprefix(_STARTS)


def _verdict(data: bytes, late: str, status: int) -> dict[str, Any]:
    """What a task's reply says, or why there is none."""
    if late:
        return {"error": "timeout", "text": late}
    if len(data) > MAX_REPLY_BYTES:
        return {"error": "crash", "text": f"the verdict is longer than {MAX_REPLY_BYTES} bytes"}
    if not _is_whole(data):
        return {"error": "crash", "text": f"the process ended without a verdict ({_describe_exit(status)})"}
    try:
        reply = json.loads(data[4:])
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict) and "value" in reply and _is_shallow(reply["value"]):
        return {"value": reply["value"]}
    if isinstance(reply, dict) and reply.get("error") == "exception":
        return {"error": "exception", "text": str(reply.get("text"))[:600]}
    return {"error": "crash", "text": "the process wrote no verdict"}


def _is_shallow(value: Any) -> bool:
    """Whether every reader of the value can follow it down."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return False


def load_function(name: str) -> Callable[..., Any]:
    """`module:name` -> the function, after the module's `warm_up()` where it has one."""
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, attribute)
    if hasattr(module, "warm_up"):
        module.warm_up()
    gc.collect()
    gc.freeze()  # forks then share the heap instead of copying it at their first collection
    return function


def _is_whole(data: bytes) -> bool:
    return len(data) >= 4 and len(data) >= 4 + int.from_bytes(data[:4], "big")


def _reap(child: int, *, wait_seconds: float) -> int:
    """End the child and all of its session; its wait status."""
    end = time.monotonic() + wait_seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # whatever it managed to start, where the kernel's filter is missing
    return status


def _describe_exit(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit status {os.WEXITSTATUS(status)}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
