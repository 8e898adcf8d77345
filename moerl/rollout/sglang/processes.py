"""One server's processes: started under a keeper, watched, ended as a whole. What the keeper does: `keeper.py`."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from moerl.errors import RolloutError
from moerl.rollout.sglang import keeper

PORTS = range(20000, 30000)
"""Where free ports are looked for: below those that Linux gives to outgoing connections, which a server that takes a
minute to listen could lose its port to."""
KEEPER_SECONDS = 10.0
"""Beyond a server's own grace: for the keeper to kill, reap and leave."""
TAIL_BYTES = 40000
NOISE = re.compile(r"nanobind|^ *- leaked |^ *- \.\.\. skipped remainder")
"""What a Python that ends with an error prints last of all, fifty lines of it, behind the reason."""


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on.

    Raises:
        RolloutError: none of many tries; `host` is no address of this machine.
    """
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.choice(PORTS)
        if is_free(host, port):
            return port
    raise RolloutError(
        f"no free port of {host} between {PORTS.start} and {PORTS.stop - 1}; is it an address of this machine?"
    )


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return True
    return False


def tail(path: Path, lines: int = 30) -> str:
    """The end of a log, indented; the words `nothing` where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    kept = [line for line in text.splitlines() if line.strip() and not NOISE.search(line)]
    return "\n".join(f"    {line[:400]}" for line in kept[-lines:]) or "    nothing"


class ServerProcess:
    """One server with all that it starts. Not safe for several threads at once."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        secret: str,
        environment: Mapping[str, str],
        grace_seconds: float,
    ) -> None:
        """Nothing runs yet.

        Args:
            command: the server's Python first; the secret is not in it.
            log_path: appended to; the secret is masked there.
            secret: the server's key, or empty.
            environment: all of it.
            grace_seconds: between asking a server to end and killing it.
        """
        self._command = list(command)
        self.log_path = log_path
        self._secret = secret
        self._environment = dict(environment)
        self._grace = grace_seconds
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once.

        Raises:
            RolloutError: its Python cannot be run, or its log cannot be written.
        """
        order = {"command": self._command, "secret": self._secret, "grace_seconds": self._grace}
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            opened = self.log_path.open("ab")
        except OSError as error:
            raise RolloutError(
                f"cannot open the server's log, {self.log_path} ({error.strerror}); make room, or set run.output_dir "
                "to a folder that can be written"
            ) from error
        with opened as log:
            try:
                self._keeper = subprocess.Popen(
                    [self._command[0], "-I", "-S", str(Path(keeper.__file__))],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise RolloutError(
                    f"cannot run the server's Python, {self._command[0]} ({error.strerror}); make its environment with "
                    "`make sglang`, or name another in rollout.engine.servers.python"
                ) from error
        self._say(json.dumps(order).encode() + b"\n")

    def tell_ready(self) -> None:
        """The server has read its key: the file that holds it can go."""
        self._say(b"ready\n")

    def status(self) -> int | None:
        """Exit status of a server that has ended with all its processes, None while it runs or was never started."""
        return None if self._keeper is None else self._keeper.poll()

    def ask_to_stop(self) -> None:
        """Have it end; returns at once."""
        if self._keeper is not None and self._keeper.stdin is not None:
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()

    def stop(self) -> None:
        """End it with all its processes, within its grace and `KEEPER_SECONDS`. Where it has ended, nothing happens."""
        if self._keeper is None:
            return
        self.ask_to_stop()
        try:
            self._keeper.wait(timeout=self._grace + KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # its server dies with it, by a signal of the kernel
            self._keeper.wait()
        self._keeper = None

    def _say(self, text: bytes) -> None:
        if self._keeper is None or self._keeper.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended; status() tells
            self._keeper.stdin.write(text)
            self._keeper.stdin.flush()
