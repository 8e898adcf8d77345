"""Starting the processes of a distributed test: one, or several under torch's launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def command(processes: int, *arguments: str) -> list[str]:
    """Python with `arguments`, in so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), *arguments]


def environment() -> dict[str, str]:
    """This process's, with the package and the shared parts of tests importable, and one thread a process."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "shared")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def run_worker(
    worker: Path, plan: Any, folder: Path, processes: int, *, limit_seconds: float, is_killed: bool = False
) -> str:
    """Run `worker PLAN.json FOLDER` to its end; its output.

    Args:
        worker: the script.
        plan: what PLAN.json holds.
        folder: where the plan and what the worker writes go.
        processes: how many.
        limit_seconds: then they are stopped, and the test fails.
        is_killed: a rank dies on purpose, and the job must end by it. It is torchrun's then; else ranks are forks.
    """
    path = folder / f"plan_{len(list(folder.glob('plan_*')))}.json"
    path.write_text(json.dumps(plan))
    arguments = [str(worker), str(path), str(folder)]
    forks = [sys.executable, str(Path(__file__).with_name("forked_ranks.py")), str(processes), *arguments]
    done = subprocess.run(
        forks if processes > 1 and not is_killed else command(processes, *arguments),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "terminate" in line or "what()" in line]
    has_ended = "Signal 9 (SIGKILL)" in done.stderr if is_killed else done.returncode == 0
    assert has_ended, "\n".join(errors[:8] or done.stderr.splitlines()[-20:])
    return done.stdout + done.stderr
