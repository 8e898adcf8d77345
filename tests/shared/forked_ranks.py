"""Several processes of one worker, forked from one that has imported what they need.

Started as `forked_ranks.py N WORKER ARGUMENT ...`. They find the environment that torch's launcher gives. What a fork
cannot show (torchrun itself, how a launch ends with a dead rank) is seen by the tests that start torchrun.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path


def main() -> int:
    """Exit status of the first process that ended with one other than 0; the others are ended then."""
    import imports_of_a_run  # noqa: F401

    gc.freeze()  # what is imported never dies: ranks need not look through it again and again

    size, worker = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [fork(rank, size, port, worker) for rank in range(size)]
    status = 0
    while ranks:
        pid, ended = os.wait()
        ranks.remove(pid)
        if ended and not status:
            status = os.waitstatus_to_exitcode(ended) & 0xFF
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return status


def fork(rank: int, size: int, port: int, worker: str) -> int:
    """Process id of a new rank, which never returns from here."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(worker).parent)
    status = 1
    try:
        runpy.run_path(worker, run_name="__main__")
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
