"""A program in the place of `sglang.launch_server`, for tests of what starts and ends servers: it speaks /health alone.

Like the real one it prints its arguments with the keys in them, and has a child that leaves its process group. What it
does is in the environment variable FAKE_SGLANG: `fail`, `never` (healthy), `stubborn` (ignores SIGTERM), `crash`
(prints SGLang's words when a part has died, and goes on).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

SOURCE = """
import http.server, json, os, signal, subprocess, sys
mode, line = os.environ.get("FAKE_SGLANG", ""), sys.argv[1:]
keys = json.load(open(line[line.index("--config") + 1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(os.environ["FAKE_SGLANG_PIDS"], "w").write(f"{os.getpid()} {child.pid}")
print("server_args=", line, keys, flush=True)
if mode == "fail":
    sys.exit("no such model")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if mode == "never" else 200)
        self.end_headers()
        if self.path == "/crash":
            print("Received sigquit from a child process. It usually means the child failed.", flush=True)
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(line[line.index("--port") + 1])), Health)
server.serve_forever()
"""


def make_python(folder: Path, source: str = SOURCE, *, path: str = "") -> Path:
    """A Python that finds `source` as `sglang.launch_server`; what it writes goes beside `folder/pids`.

    `path`: further places of packages.
    """
    package = folder / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(source)
    python = folder / "python"
    variables = f"FAKE_SGLANG_PIDS={folder}/pids PYTHONPATH={folder}/fake:{path}"
    python.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def pids(folder: Path) -> list[int]:
    """The program's and its child's."""
    path = folder / "pids"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def kill(folder: Path) -> None:
    """The program, by signal 9."""
    os.kill(pids(folder)[0], signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and waits to be reaped does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command_lines() -> str:
    """Those of every process that this user may see, and their environments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                found.append((process / name).read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    assert any(str(os.getpid()) == path.name for path in Path("/proc").glob("[0-9]*"))
    return "\n".join(found)
