"""Stands between moerl and one server: hands it its key, masks the key in its log, and leaves nothing of it behind.

Run by a server's own Python, as a script, with the standard library alone (`processes.py` starts it). Its first line of
standard input is a JSON object: `command`, `secret`, `grace_seconds`. What the server prints goes to standard output,
where the secret is replaced by `<key>`: SGLang writes all of its arguments, keys included, into its log.

The secret reaches the server through a configuration file (`--config`) in a folder that only this user can enter, so it
is in no list of processes; the file is deleted when moerl writes `ready` to standard input, or when this ends.

The server ends with this process, and this process ends when moerl does, whatever killed it: standard input closes, or
the parent is another. First the server is asked (SIGTERM), after the grace its process group is killed, then every
process that came of it, also those that left the group (this process is their reaper). Exit status: the server's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_SECONDS = 0.5
READ_BYTES = 65536
MAX_LINE_BYTES = 1_000_000
MASK = b"<key>"

FATAL = (b"Received sigquit from a child process", b"SIGQUIT received.")
"""SGLang's words when a part of it has died. It then writes diagnostics for a minute while it serves nobody."""
LAST_WORDS_SECONDS = 3.0
"""For the traceback to be written."""


class Masked:
    """Copies lines to a file descriptor, without the secret."""

    def __init__(self, target: int, secret: str) -> None:
        self._target = target
        self._secret = secret.encode()
        self._rest = b""
        self.is_fatal = False

    def feed(self, chunk: bytes) -> None:
        """Whole lines go out; the rest waits, since a secret may be cut in two."""
        lines, newline, rest = (self._rest + chunk).rpartition(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, newline, rest = self._rest + chunk, b"\n", b""
        self._rest = rest
        self._write(lines + newline)

    def close(self) -> None:
        """What is left."""
        self._write(self._rest)
        self._rest = b""

    def _write(self, text: bytes) -> None:
        if text:
            self.is_fatal = self.is_fatal or any(words in text for words in FATAL)
            with contextlib.suppress(OSError):  # a full disk must not end the server
                os.write(self._target, text.replace(self._secret, MASK) if self._secret else text)


class Keeper:
    """One server, from its start to the end of its last process."""

    def __init__(self, command: list[str], secret: str, grace_seconds: float) -> None:
        self._grace = grace_seconds
        self._parent = os.getppid()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._folder = tempfile.TemporaryDirectory(prefix="moerl-sglang-")
        if secret:
            path = Path(self._folder.name) / "keys.yaml"
            path.touch(mode=0o600)
            path.write_text(json.dumps({"api-key": secret, "admin-api-key": secret}))
            command = [*command, "--config", str(path)]
        self._log = Masked(sys.stdout.fileno(), secret)
        self._is_stopping = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  no threads here
        )

    def run(self) -> int:
        """Until the server has ended or shall; then nothing of it is left."""
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.stdout, selectors.EVENT_READ)
            selector.register(sys.stdin, selectors.EVENT_READ)
            while not self._shall_stop() and self._server.poll() is None:
                ready = {key.fd for key, _ in selector.select(LOOK_SECONDS)}
                if sys.stdin.fileno() in ready:
                    self._obey()
                if self._server.stdout.fileno() in ready and not self._drain():
                    selector.unregister(self._server.stdout)
        self._end()
        self._log.close()
        self._folder.cleanup()
        return self._server.returncode

    def _shall_stop(self) -> bool:
        return self._is_stopping or self._log.is_fatal or os.getppid() != self._parent

    def _on_signal(self, _number: int, _frame: Any) -> None:
        self._is_stopping = True

    def _obey(self) -> None:
        word = os.read(sys.stdin.fileno(), READ_BYTES)
        if b"ready" in word:
            (Path(self._folder.name) / "keys.yaml").unlink(missing_ok=True)
        self._is_stopping = self._is_stopping or not word

    def _drain(self) -> bool:
        """Copy what was printed so far; False at its end."""
        assert self._server.stdout is not None
        while True:
            try:
                chunk = os.read(self._server.stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._log.feed(chunk)

    def _end(self) -> None:
        if self._log.is_fatal:
            self._wait(LAST_WORDS_SECONDS)
        elif self._server.poll() is None:
            self._server.terminate()
            self._wait(self._grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        while children := _children():
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        self._drain()

    def _wait(self, seconds: float) -> None:
        """For the server to end by itself; its log goes on meanwhile."""
        end = time.monotonic() + seconds
        while self._server.poll() is None and time.monotonic() < end:
            self._drain()
            time.sleep(0.05)


def _children() -> list[int]:
    """Processes whose parent is this one, also those that became so when their own parent ended."""
    found, me = [], str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name, which may hold spaces and brackets) state parent ...
            if path.read_text().rpartition(")")[2].split()[1] == me:
                found.append(int(path.parent.name))
    return found


def main() -> int:
    """The server's exit status; a signal's number is made negative, as `subprocess` has it, and comes as 128 + it."""
    order = json.loads(_first_line())
    status = Keeper(order["command"], order["secret"], order["grace_seconds"]).run()
    return status if status >= 0 else 128 - status


def _first_line() -> bytes:
    """Of standard input, byte by byte, so that nothing behind it is swallowed by a buffer."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            sys.exit(0)
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
