"""Training that generates ahead, as real runs: the same prompts a step as without, through kills and Ctrl-C."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

STEPS, GROUPS = 6, 4
AHEAD = ("rollout.max_staleness=1", "rollout.engine={name: local, pause_mode: abort}", "checkpoint.export_hf=false")


def ahead(stage):
    return stage.moerl.train(stage.files.tiny, *AHEAD, name="ahead")


def resuming(stage):
    return stage.moerl.train(stage.files.tiny, *AHEAD, "rollout.long_tail=resume", "run.num_steps=4", name="resuming")


def at_step(stage, name: str, step: int, number: int):
    """Start a run, send it the signal once the record of `step` is there, and wait for its end."""
    folder = stage.moerl.folder / name
    process = stage.moerl.start(*stage.moerl.arguments(stage.files.tiny, *AHEAD, name=name))
    path = folder / "metrics.jsonl"
    while process.poll() is None and not (path.is_file() and path.read_bytes().count(b"\n") > step):
        time.sleep(0.001)
    if process.poll() is None:
        os.killpg(process.pid, number)
    return stage.moerl.finish(process, folder)


def killed(stage):
    first = at_step(stage, "ahead_killed", 3, signal.SIGKILL)
    left = events_of(first.folder)
    return first, left, stage.moerl.train(stage.files.tiny, *AHEAD, "run.resume=required", name="ahead_killed")


def interrupted(stage):
    first = at_step(stage, "ahead_interrupted", 2, signal.SIGINT)
    return first, stage.moerl.train(stage.files.tiny, *AHEAD, name="ahead_interrupted")


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads((folder / "trace.json").read_text()) if event["ph"] == "X"]


def prompts_of(run) -> dict[int, list[str]]:
    """Step -> ids of the prompts that it trained on, in order."""
    rows = [json.loads(line) for line in (run.folder / "pass_rates.jsonl").read_text().splitlines()]
    return {step: [row["prompt_id"] for row in mine] for step, mine in itertools.groupby(rows, lambda row: row["step"])}


@pytest.mark.runs.with_args("tiny", ahead)
def test_every_step_trains_on_the_prompts_of_the_synchronous_one(runs):
    run = runs[ahead].expect(0)
    assert prompts_of(run) == prompts_of(runs["tiny"])
    assert run.values("rollout/groups") == [GROUPS] * STEPS
    assert run.values("rollout/groups_dropped") == [0] * STEPS


@pytest.mark.runs.with_args(ahead)
def test_nothing_is_sampled_for_steps_that_never_come(runs):
    last = json.loads((runs[ahead].expect(0).folder / "checkpoints" / f"step_{STEPS:06d}" / "loop.json").read_text())
    assert last["rollouts"]["plan"]["tickets"] == []
    assert {event["args"]["step"] for event in events_of(runs[ahead].folder) if "/" in event["name"]} == set(
        range(1, STEPS + 1)
    )


@pytest.mark.runs.with_args(ahead)
def test_tokens_are_at_most_one_version_old_and_the_contract_is_judged_on_fresh_ones(runs):
    rows = runs[ahead].expect(0).rows[1:]
    assert rows[0]["rollout/staleness_max"] == 0
    assert rows[0]["contract/holds"] == 1
    assert rows[0]["mm/logp_abs_max"] < 1e-4
    assert {row["rollout/staleness_max"] for row in rows[1:]} == {1.0}
    assert all(0 < row["rollout/staleness_mean"] <= 1 for row in rows[1:])
    assert max(row["mm/logp_abs_max"] for row in rows[1:]) > 1e-3, "answers of an older policy differ from this one's"


@pytest.mark.runs.with_args("tiny", ahead)
def test_the_trace_shows_who_worked_when(runs):
    def working_and_generating(folder: Path) -> float:
        """Seconds in which a group was sampled while the learner's side did something else than wait for it."""
        events = events_of(folder)
        assert {"rollout", "score", "update", "publish", "evaluate", "checkpoint"} <= {e["name"] for e in events}
        work = [e for e in events if e["name"] in ("score", "update", "evaluate", "checkpoint")]
        groups = [e for e in events if "/" in e["name"]]
        assert len(groups) >= STEPS * GROUPS
        shared = 0
        for one in work:
            ends = [min(one["ts"] + one["dur"], e["ts"] + e["dur"]) - max(one["ts"], e["ts"]) for e in groups]
            shared += max(0, *ends)
        return shared / 1e6

    assert working_and_generating(runs["tiny"].folder) == 0
    run = runs[ahead].expect(0)
    assert working_and_generating(run.folder) > 0
    *shares, last = run.values("perf/overlap_fraction")
    assert len(shares) == STEPS - 1
    assert all(0 < share <= 1 for share in shares)
    assert 0 <= last <= 1, "its groups are all that is left to sample"


@pytest.mark.runs.with_args(resuming)
def test_steps_may_train_on_what_is_finished(runs):
    run = runs[resuming].expect(0)
    assert run.values("rollout/groups") == [GROUPS] * 4
    assert run.values("rollout/groups_dropped") == [0] * 4
    assert max(run.values("rollout/staleness_max")) <= 1


@pytest.mark.runs.with_args("tiny", killed)
def test_a_kill_loses_nothing_and_trains_on_nothing_twice(runs):
    first, left, run = runs[killed]
    assert first.status == -signal.SIGKILL
    assert left, "the trace of a killed run loads"
    run.expect(0)
    assert prompts_of(run) == prompts_of(runs["tiny"])
    assert run.values("rollout/groups") == [GROUPS] * STEPS
    assert max(run.values("rollout/staleness_max")) <= 1
    assert len(events_of(run.folder)) > len(left)


@pytest.mark.runs.with_args("tiny", interrupted)
def test_ctrl_c_ends_with_130_and_the_run_goes_on(runs):
    first, run = runs[interrupted]
    assert first.status == 130, first.output[-4000:]
    assert "its state is saved" in first.output
    assert prompts_of(run.expect(0)) == prompts_of(runs["tiny"])
