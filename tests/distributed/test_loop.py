"""A run of several processes ends as one: a rank that is killed, Ctrl-C, an error that one rank finds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_files import METHODS, ROOT, deep_policy, write_config

LIMIT_SECONDS = 600


class Bench:
    """Files, and the ways to start what is tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        model = deep_policy(folder / "deep")
        self.configs = {method: write_config(folder, method, model) for method in METHODS}

    def start(self, processes: int, *command: str) -> subprocess.Popen[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        arguments = [sys.executable, *(launcher if processes > 1 else []), *command]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def train(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        return self.start(2, "-m", "moerl", "train", str(self.configs["gspo"]), f"run.name={name}", *overrides)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process id of what the launcher started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in children:
        words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): int(child) for word in words if word.startswith(b"RANK=")}
    return found


def wait_for(process: subprocess.Popen[str], is_reached: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_reached():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def has_step(folder: Path, step: int) -> bool:
    return (folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()


def are_gone(pids: dict[int, int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("loop"))


def test_a_rank_that_is_killed_ends_all_with_one_message_and_the_run_goes_on(bench):
    process = bench.train("killed", "run.num_steps=40", "checkpoint.export_hf=false")
    wait_for(process, lambda: has_step(bench.runs / "killed", 1))
    pids = ranks_of(process)
    assert sorted(pids) == [0, 1]
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    output = finish(process)
    assert process.returncode != 0
    assert time.monotonic() - started < 60
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert lines[0].startswith("moerl: rank 1 died in phase ")
    assert "start the same command to go on" in lines[0]
    assert are_gone(pids)
    done = max(step for step in range(1, 41) if has_step(bench.runs / "killed", step))
    again = bench.train("killed", f"run.num_steps={done + 1}", "checkpoint.export_hf=false")
    output = finish(again)
    assert again.returncode == 0, output[-4000:]
    assert f"going on from step {done} " in output


def test_ctrl_c_saves_on_all_ranks_and_ends_with_130(bench):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    script, config = ROOT / "launch" / "local.sh", bench.configs["gspo"]
    command = [str(script), "2", str(config), "run.name=ctrl_c", "run.num_steps=40"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(process, lambda: has_step(bench.runs / "ctrl_c", 1))
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output[-4000:]
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert "its state is saved; go on with: torchrun --standalone --nproc-per-node 2 -m moerl train" in lines[0]


def test_an_error_of_one_rank_is_told_once_with_its_status(bench):
    process = bench.train("wrong", "data.max_prompt_tokens=1", "data.on_long_prompt=refuse")
    output = finish(process)
    assert process.returncode != 0
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert "exitcode  : 2" in output
