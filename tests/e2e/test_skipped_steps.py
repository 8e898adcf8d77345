"""Steps without a token to train on: nothing moves, the run goes on, and a run resumed after one is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moerl.analysis.compare import compare_files
from moerl.build import build_run
from moerl.configure import load
from moerl.loop import train

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "run.num_steps=4",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "batch.num_minibatches=2",
    "data.shuffle=false",
    "reward.rewards=[{name: exact_match}]",
    "algorithm.preset=reinforce",
    "optim.warmup_steps=0",
    "evaluation.sets.0.limit=4",
    "evaluation.interval_steps=2",
    "telemetry.progress=off",
    "telemetry.report=false",
    "telemetry.probe_prompts=0",
    "checkpoint.interval_steps=1",
    "checkpoint.keep=9",
)
EMPTY = {
    "every group is filtered": (
        "algorithm.filters=[{name: zero_variance}]",
        "reward.rewards=[{name: regex_match, pattern: '(9999)'}]",
    ),
    "every answer is masked": ("algorithm.filters=[{name: overlong}]", "rollout.max_new_tokens=1"),
    "every advantage of a pair is 0": (
        "algorithm.preset=group_dpo",
        "reward.rewards=[{name: regex_match, pattern: '(9999)'}]",
    ),
}


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Rows of metrics of the run in `folder`."""
    where = (f"run.output_dir={folder.parent}", f"run.name={folder.name}")
    made = build_run(load(ROOT / "configs" / "demo" / "base.yaml", [*SETTINGS, *overrides, *where]))
    assert made is not None
    try:
        train(made.rooms, made.schedule, made.resume_from)
    finally:
        made.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learner(folder: Path, step: int) -> dict[str, bytes]:
    """The learner's files in the checkpoint of `step`: weights, optimizer, version."""
    files = (folder / "checkpoints" / f"step_{step:06d}" / "learner").rglob("*")
    return {path.name: path.read_bytes() for path in files if path.is_file()}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("reason", EMPTY)
def test_a_run_of_nothing_but_empty_steps_ends_with_the_weights_it_began_with(tmp_path: Path, reason: str) -> None:
    rows = run(tmp_path / "empty", *EMPTY[reason], "run.num_steps=2")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["optim/skipped_steps"] == 1.0 and "loss" not in row for row in rows[1:])
    first, last = (learner(tmp_path / "empty", step) for step in (1, 2))
    assert first
    assert first == last


def tasks(path: Path) -> str:
    """Steps 2 and 3 ask what the policy never gets right; it is right at times in the others."""
    easy = [{"prompt": "2+3=?", "answer": "5"}, {"prompt": "4+4=?", "answer": "8"}]
    never = [{"prompt": "1+1=?", "answer": "77"}, {"prompt": "1+2=?", "answer": "77"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*easy, *never, *never, *easy)))
    return f"data.train=[{{name: tasks, source: {{name: file, path: {path}}}}}]"


def test_empty_steps_in_a_run_move_nothing_and_resume_from_one_changes_nothing(tmp_path: Path) -> None:
    settings = (
        tasks(tmp_path / "tasks.jsonl"),
        "algorithm.preset=raft_pp",
        "reward.rewards=[{name: regex_match, pattern: '([0-9]+)[^0-9]*$'}]",
    )
    rows = run(tmp_path / "whole", *settings)
    skipped = [row.get("optim/skipped_steps", 0.0) for row in rows[1:]]
    assert skipped == [0.0, 1.0, 1.0, 0.0]
    states = [learner(tmp_path / "whole", step) for step in (1, 2, 3, 4)]
    assert states[0] == states[1] == states[2]
    assert states[2] != states[3]
    run(tmp_path / "parts", *settings, "run.num_steps=2")
    run(tmp_path / "parts", *settings)
    comparison = compare_files(tmp_path / "whole", tmp_path / "parts")
    assert comparison.is_equal, comparison.differences
    assert learner(tmp_path / "parts", 4) == states[3]
