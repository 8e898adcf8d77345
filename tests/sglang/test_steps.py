"""Level 2: whole RL steps of the demo with routes replayed (R3), on real SGLang servers that the run starts itself."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from sglang_talk import kill

from moerl.build import build_run
from moerl.configure import load
from moerl.loop import train
from moerl.rollout.engines.sglang_engine import SglangEngine

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "demo" / "gspo_sglang.yaml"
SAMPLES = 32
TOLERANCE = 5e-5
"""Between the server's logprobs and the learner's, both in float32."""
LIMIT_SECONDS = 120.0

pytestmark = pytest.mark.slow


@pytest.fixture
def engines(monkeypatch):
    """Those that are made in the test."""
    found, init = [], SglangEngine.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(SglangEngine, "__init__", noted)
    return found


@pytest.fixture
def started(python, tmp_path):
    """Starts a run of so many steps; ends it, and its servers, after the test."""
    runs = []

    def start(num_steps, *overrides):
        run = build_run(
            load(
                str(RECIPE),
                [
                    f"run.num_steps={num_steps}",
                    f"run.output_dir={tmp_path}",
                    "run.name=r3",
                    "algorithm.routing=R3",
                    f"rollout.engine.servers.python={python}",
                    "rollout.engine.health_seconds=1.0",
                    "rollout.prompts_per_step=4",
                    f"rollout.group_size={SAMPLES // 4}",
                    "checkpoint.interval_steps=0",
                    "checkpoint.export_hf=false",
                    "telemetry.progress=off",
                    "telemetry.report=false",
                    "telemetry.probe_prompts=0",
                    *overrides,
                ],
            )
        )
        assert run is not None
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.close()


def rows_of(run, folder):
    """Of metrics.jsonl after the whole run, without that of step 0."""
    train(run.rooms, run.schedule, run.resume_from)
    return [json.loads(line) for line in (folder / "r3" / "metrics.jsonl").read_text().splitlines()][1:]


def assert_of_one_policy(row):
    """Every answer is there once, and its logprobs and routes are the learner's."""
    assert row["engine/completions"] == SAMPLES
    assert row["rollout/errors"] == row["rollout/aborted"] == row["engine/bad_answers"] == 0
    assert row["rollout/staleness_mean"] == 0
    assert row["mm/logp_abs_max"] < TOLERANCE
    assert row["route/replay_coverage"] == 1
    assert row["route/max_margin_of_changed"] < 1e-5
    assert row["route/set_change"] < 0.01


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2xep2"])
def test_two_steps(started, tmp_path, ranks):
    parts = [f"rollout.engine.servers.{name}={ranks}" for name in ("tensor", "expert")]
    rows = rows_of(started(2, *parts), tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert_of_one_policy(row)
        assert row["engine/lost"] == row["engine/restarts"] == 0
        assert row["optim/grad_norm"] > 0


def test_the_only_server_killed_with_answers_on_it_costs_no_answer(engines, started, tmp_path):
    run = started(3)
    take, [engine] = run.rooms.rollouts.take, engines
    killed = threading.Event()

    def kill_amid():
        before, end = engine.counts()["completions"], time.monotonic() + LIMIT_SECONDS
        while not 2 <= engine.counts()["completions"] - before < SAMPLES // 2:
            if time.monotonic() > end:
                return
            time.sleep(0.002)
        kill(engine._found[0])
        killed.set()

    def told(step, version):
        if step != 2:
            return take(step, version)
        thread = threading.Thread(target=kill_amid)
        thread.start()
        found = take(step, version)
        thread.join()
        return found

    run.rooms.rollouts.take = told
    rows = rows_of(run, tmp_path)
    assert killed.is_set(), "no moment with some answers there and others on the way"
    for row in rows:
        assert_of_one_policy(row)
    assert [row["engine/restarts"] for row in rows] == [0, 1, 0]
    assert [row["engine/lost"] > 0 for row in rows] == [False, True, False]
