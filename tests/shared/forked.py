"""`moerl` in a process of its own, without the seconds that its imports take: forks of a server that has imported them.

A fork calls the same `main` with the same arguments, in a session of its own, with the files that it prints to as its
streams. What a fork cannot show (that a command's imports work in its own order, how the interpreter ends) is seen by
the commands that tests start as `python -m moerl`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["imports_of_a_run"])
_LOCK = threading.Lock()
"""A process that starts asks after all others, and an exit status can be read once."""


def run(arguments: list[str], path: Path | None, stdout: Path, stderr: Path, *, limit_seconds: float) -> int:
    """Exit status of `python -m moerl ARGUMENTS` in the repository's root; `path` goes on the module search path."""
    with _LOCK:
        process = _started(arguments, path, stdout, stderr)
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        with _LOCK:
            status = process.exitcode
        if status is not None:
            return status
        time.sleep(0.02)
    os.killpg(process.pid or 0, signal.SIGKILL)
    raise TimeoutError(f"stopped after {limit_seconds} s: moerl {' '.join(arguments)}")


def _started(arguments: list[str], path: Path | None, stdout: Path, stderr: Path) -> BaseProcess:
    before = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    process = CONTEXT.Process(target=_main, args=(arguments, path, stdout, stderr))
    process.start()
    return process


def _main(arguments: list[str], path: Path | None, stdout: Path, stderr: Path) -> None:
    os.setsid()
    for name, number in ((stdout, 1), (stderr, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    assert "megatron.core" in sys.modules, "the server imported nothing; `import imports_of_a_run` says why"
    os.chdir(ROOT)
    names = [str(ROOT), *([str(path)] if path else [])]
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(names)}
    sys.path[:0] = names
    sys.argv = ["moerl", *arguments]

    from moerl.__main__ import main

    sys.exit(main())
