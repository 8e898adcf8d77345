"""Generation ahead of training in several processes: rank 0 samples while all ranks train, and a fault ends all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_files import deep_policy, start, write_config

LIMIT_SECONDS = 300
AHEAD = ("rollout.max_staleness=1", "rollout.engine={name: local, pause_mode: abort}", "checkpoint.export_hf=false")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    return write_config(folder, "gspo", deep_policy(folder / "deep"))


def train(config: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    return start(2, "-m", "moerl", "train", str(config), f"run.name={name}", *AHEAD, *overrides)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=LIMIT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def test_two_ranks_train_while_the_first_samples(config):
    process = train(config, "two", "run.num_steps=3")
    output = finish(process)
    assert process.returncode == 0, output[-4000:]
    lines = (config.parent / "runs" / "two" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][1:]
    assert [row["rollout/groups"] for row in rows] == [4, 4, 4]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1]
    assert rows[0]["contract/holds"] == 1
    assert all(row["optim/updates"] == 2 for row in rows)


def test_a_rank_that_is_killed_ends_the_one_that_samples(config):
    process = train(config, "killed", "run.num_steps=60")
    path = config.parent / "runs" / "killed" / "metrics.jsonl"
    while process.poll() is None and not (path.is_file() and path.read_bytes().count(b"\n") > 1):
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    second = [pid for pid in children if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(int(second[0]), signal.SIGKILL)
    output = finish(process)
    assert process.returncode != 0
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert lines[0].startswith("moerl: rank 1 died in phase ")
