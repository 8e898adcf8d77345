"""Several processes train with replayed routes while rank 0 alone talks to the servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import ranks
from served_runs import SERVED, SMALL, engine_of

from moerl.rollout.fake_engine.serving import FakeServer

LIMIT_SECONDS = 300
EVALUATING = "evaluation.sets=[{name: held, source: {name: file, path: configs/demo/data/heldout.jsonl}, limit: 4}]"


def train(folder: Path, url: str, *overrides: str) -> tuple[int, str]:
    """`moerl train` in two processes: exit status and output."""
    given = [*SMALL, engine_of([url]), EVALUATING, f"run.output_dir={folder}", "run.name=two", *overrides]
    command = ranks.command(2, "-m", "moerl", "train", "configs/demo/gspo.yaml", *given)
    process = subprocess.Popen(
        command,
        cwd=ranks.ROOT,
        env=ranks.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=LIMIT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def test_two_ranks_train_on_the_answers_of_one_server(tmp_path: Path) -> None:
    with FakeServer(SERVED) as server:
        status, output = train(tmp_path, server.url, "run.num_steps=2", "algorithm.routing=R3")
        assert status == 0, output[-4000:]
        seen = server.state()
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert seen["label"] == "2"
    assert seen["calls"].count("/update_weights_from_disk") == 3, "rank 0 alone publishes"
    assert seen["counts"]["/generate"] == sum(row["engine/requests"] for row in rows) == 2 * 12 + 2 * 16
    for row in rows[1:]:
        assert row["rollout/errors"] == 0
        assert row["route/replay_coverage"] == 1.0
        assert row["optim/updates"] == 1
        assert row["optim/grad_norm"] > 0
