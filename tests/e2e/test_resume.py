"""A run that was stopped, killed or damaged goes on as if nothing had happened, or says why it will not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.analysis.compare import compare_files
from moerl.checkpoint import MANIFEST
from moerl.configure import load
from moerl.run_folder import config_id

STEPS = 6


def assert_same_run(run, whole):
    """Weights, every metric that is no time, rollouts and loads, to the bit."""
    comparison = compare_files(run.folder, whole.folder)
    assert comparison.differences == []
    assert comparison.is_equal
    assert comparison.num_steps == STEPS + 1
    assert comparison.num_values > 1000
    for name in ("hf/model.safetensors", "samples.jsonl", "load.jsonl", "pass_rates.jsonl"):
        assert (run.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    assert run.summary["steps"] == STEPS
    assert run.summary["accuracy_before"] == whole.summary["accuracy_before"]


def wait_until(process, is_reached):
    """Until the moment has come; False if the process ended before."""
    while not is_reached():
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    return True


def kill_at(process, is_reached):
    """Whether the kill came in time."""
    if wait_until(process, is_reached):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:06d}"


def has_step(folder: Path, step: int) -> bool:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n") > step
    except FileNotFoundError:  # not yet, or just now: a run without a checkpoint begins its records anew
        return False


def is_writing(folder: Path, step: int) -> bool:
    """Part of the checkpoint of `step`, or a later one, is on the disk and not all of it."""
    partial = [path.name for path in (folder / "checkpoints").glob(".partial-step_*/learner/*")]
    return bool(partial) and has_step(folder, step)


# Stories


def killed_at_three(stage):
    name = "killed_at_three"
    folder = stage.moerl.folder / name
    background = "checkpoint.async_save=true"
    process = stage.moerl.start(*stage.moerl.arguments(stage.files.tiny, background, name=name))
    assert kill_at(process, (checkpoint(folder, 3) / MANIFEST).is_file)
    return stage.moerl.train(stage.files.tiny, "run.resume=required", background, name=name)


def killed_often(stage):
    """Killed while it starts, while it writes checkpoints, between record and checkpoint, and at its very end."""
    name = "killed_often"
    folder = stage.moerl.folder / name
    moments = (
        (folder / "config.yaml").exists,
        lambda: is_writing(folder, 1),
        lambda: has_step(folder, 3),
        lambda: is_writing(folder, 4),
        (checkpoint(folder, STEPS) / MANIFEST).is_file,
    )
    kills = 0
    for moment in moments:
        process = stage.moerl.start(*stage.moerl.arguments(stage.files.tiny, name=name))
        kills += kill_at(process, moment)
    return kills, stage.moerl.train(stage.files.tiny, name=name)


def interrupted(stage):
    """Ctrl-C on a terminal reaches every process of the group."""
    name = "interrupted"
    folder = stage.moerl.folder / name
    process = stage.moerl.start(*stage.moerl.arguments(stage.files.tiny, name=name))
    wait_until(process, lambda: has_step(folder, 2))
    os.killpg(process.pid, signal.SIGINT)
    first = stage.moerl.finish(process, folder)
    left = sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
    return first, left, stage.moerl.train(stage.files.tiny, name=name)


def interrupted_twice(stage):
    name = "interrupted_twice"
    folder = stage.moerl.folder / name
    slow = ("rollout.prompts_per_step=8", "rollout.group_size=256", "run.num_steps=50", "run.resume=never")
    process = stage.moerl.start(*stage.moerl.arguments(stage.files.tiny, *slow, name=name))
    wait_until(process, (checkpoint(folder, 1) / MANIFEST).is_file)
    time.sleep(0.3)  # into the second step, which takes longer than both signals
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    told = process.stderr.readline()  # a second signal before the first was taken would be the same one
    process.send_signal(signal.SIGINT)
    run = stage.moerl.finish(process, folder)
    return replace(run, stderr=told + run.stderr)


def copy_of(stage, name):
    """A copy of the finished run, to go on from under another name."""
    folder = stage.moerl.folder / name
    shutil.copytree(stage.runs["tiny"].folder, folder)
    return folder


def changed_configuration(stage):
    folder = copy_of(stage, "changed")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    refused = stage.moerl.train(
        stage.files.tiny, "run.num_steps=7", "optim.lr=1e-3", "rollout.top_p=0.5", name="changed"
    )
    untouched = before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    allowed = stage.moerl.train(stage.files.tiny, "run.num_steps=7", "evaluation.interval_steps=3", name="changed")
    return refused, untouched, allowed


def damaged_checkpoint(stage):
    folder = copy_of(stage, "damaged")
    file = next((checkpoint(folder, STEPS) / "learner").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (folder / "summary.json").unlink()
    refused = stage.moerl.train(stage.files.tiny, name="damaged")
    return refused, stage.moerl.train(stage.files.tiny, "checkpoint.on_corrupt=previous", name="damaged")


def cut_off_at_the_end(stage):
    folder = copy_of(stage, "cut_off")
    for name in ("summary.json", "hf/model.safetensors"):
        (folder / name).unlink()
    ended = stage.moerl.train(stage.files.tiny, name="cut_off")
    before = (folder / "summary.json").read_bytes()
    again = stage.moerl.train(stage.files.tiny, name="cut_off")
    return ended, again, before == (folder / "summary.json").read_bytes()


def changed_data(stage):
    folder = copy_of(stage, "changed_data")
    other = folder.with_name("nine.jsonl")
    source = stage.files.tiny.with_name("ten.jsonl").read_text()
    other.write_text(source.replace('"answer": "', '"answer": "1', 1))
    config = folder.with_name("changed_data.yaml")
    # The file keeps its name in the run's own config.yaml, so that only its contents differ.
    for path, text in ((config, stage.files.tiny.read_text()), (folder / "config.yaml", None)):
        path.write_text((text or path.read_text()).replace(str(stage.files.tiny.with_name("ten.jsonl")), str(other)))
    return stage.moerl.train(config, "run.num_steps=7", name="changed_data")


def judge_down(stage):
    """Evaluations after steps 4 and 6, the last one, fail; each run goes on once the judge is there again."""
    down, rows = stage.moerl.folder / "the judge is down", []
    reward = f"reward.rewards=[{{name: 'judge_that_fails:judge', down: '{down}'}}]"

    def run(name, *overrides):
        return stage.moerl.train(stage.files.tiny, reward, "checkpoint.interval_steps=5", *overrides, name=name)

    def run_without_judge():
        down.touch()
        run = failing()
        down.unlink()
        left = sorted(int(path.name.removeprefix("step_")) for path in (run.folder / "checkpoints").glob("step_*"))
        rows.append((run.rows, left, (run.folder / "summary.json").exists()))
        return run

    def failing():
        return run("judge_down")

    whole = run("judge_up").expect(0)
    run("judge_down", "run.num_steps=2").expect(0)
    failed = [run_without_judge(), run_without_judge()]
    between = run("judge_down", "run.num_steps=4")
    failed.append(run_without_judge())
    return whole, failed, rows, between, failing()


# What must be true of them


@pytest.mark.runs.with_args("tiny")
def test_epochs_go_on_over_steps(runs):
    """Ten prompts, four a step: the third step begins in the first epoch and ends in the second."""
    epochs = runs["tiny"].values("data/epoch")
    assert epochs == [0.4, 0.8, 1.2, 1.6, 2.0, 2.4]


@pytest.mark.runs.with_args("tiny", killed_at_three)
def test_three_steps_a_kill_and_three_steps_are_six_steps(runs):
    run = runs[killed_at_three].expect(0)
    assert_same_run(run, runs["tiny"])
    assert "going on from step 3" in run.output


@pytest.mark.runs.with_args("tiny", killed_often)
def test_kills_at_the_worst_moments_change_nothing(runs):
    kills, run = runs[killed_often]
    assert kills >= 4, "the moments passed too fast"
    run.expect(0)
    assert_same_run(run, runs["tiny"])
    left = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert left[-3:] == ["step_000004", "step_000005", "step_000006"]
    assert set(left[:-3]) <= {"step_000003"}  # where the last kill came before the oldest was deleted


@pytest.mark.runs.with_args("tiny", interrupted)
def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_does(runs):
    first, left, second = runs[interrupted]
    first.expect(130)
    assert "its state is saved; go on with: moerl train" in first.stderr
    assert "run.name=interrupted" in first.stderr
    assert "Traceback" not in first.output
    assert left
    assert left[-1] < STEPS
    assert f"stopped after step {left[-1]} of {STEPS}" in first.stderr
    assert f"going on from step {left[-1]} " in second.expect(0).output
    assert_same_run(second, runs["tiny"])


@pytest.mark.runs.with_args(interrupted_twice)
def test_a_second_ctrl_c_stops_at_once_and_keeps_the_last_checkpoint(runs):
    run = runs[interrupted_twice].expect(130)
    assert "once more stops at once" in run.stderr
    assert "moerl: stopped at once; the last complete checkpoint is untouched" in run.stderr
    assert "Traceback" not in run.output
    assert {path.name[:5] for path in (run.folder / "checkpoints").iterdir()} == {"step_"}


@pytest.mark.runs.with_args("tiny", changed_configuration)
def test_a_changed_configuration_is_refused_or_allowed(runs):
    refused, untouched, allowed = runs[changed_configuration]
    refused.expect(2)
    assert "the run cannot go on with another configuration" in refused.stderr
    assert "optim.lr: 0.00015 in the run, 0.001 now" in refused.stderr
    assert "rollout.top_p: 1.0 in the run, 0.5 now" in refused.stderr
    assert "May change on resume: run.name, run.num_steps" in refused.stderr
    assert "run.num_steps:" not in refused.stderr
    assert untouched
    assert [row["step"] for row in allowed.expect(0).rows] == list(range(8))
    assert allowed.rows[: STEPS + 1] == runs["tiny"].rows
    assert allowed.summary["steps"] == 7
    assert "num_steps: 7" in (allowed.folder / "config.yaml").read_text()


@pytest.mark.runs.with_args("tiny", changed_configuration)
def test_a_checkpoint_tells_with_which_configuration_it_was_made(runs, files):
    _, _, run = runs[changed_configuration]

    def told(step):
        return json.loads((checkpoint(run.folder, step) / MANIFEST).read_text())["config_id"]

    def made_with(name, *changes):
        return config_id(load(files.tiny, [*changes, f"run.output_dir={run.folder.parent}", f"run.name={name}"]))

    assert told(STEPS) == made_with("tiny")
    assert told(STEPS + 1) == made_with("changed", "run.num_steps=7", "evaluation.interval_steps=3")
    assert told(STEPS + 1) != made_with("changed", "run.num_steps=7", "evaluation.interval_steps=2")


@pytest.mark.runs.with_args("tiny", damaged_checkpoint)
def test_a_damaged_checkpoint_is_refused_or_the_previous_one_used(runs):
    refused, again = runs[damaged_checkpoint]
    refused.expect(1)
    assert "does not match its SHA-256 in the manifest" in refused.stderr
    assert "checkpoint.on_corrupt=previous goes on from step 5" in refused.stderr
    assert "Traceback" not in refused.output
    assert_same_run(again.expect(0), runs["tiny"])


@pytest.mark.runs.with_args("tiny", cut_off_at_the_end)
def test_an_end_that_was_cut_off_is_made_up_for_once(runs):
    ended, again, unchanged = runs[cut_off_at_the_end]
    assert_same_run(ended.expect(0), runs["tiny"])
    assert f"has done its {STEPS} steps; raise run.num_steps to train on" in again.expect(0).stderr
    assert unchanged


@pytest.mark.runs.with_args("tiny", changed_data)
def test_data_that_changed_in_between_is_refused(runs):
    run = replace(runs[changed_data]).expect(2)
    assert "data set 'ten' has changed since the checkpoint: 10 prompts" in run.stderr
    assert "Traceback" not in run.output


@pytest.mark.runs.with_args(judge_down)
def test_a_failed_evaluation_loses_no_step_and_is_made_up_for_when_the_run_goes_on(runs):
    whole, failed, left, between, run = runs[judge_down]
    for outcome, step in zip(failed, (4, 4, 6), strict=True):
        outcome.expect(1)
        assert "evaluation: 16 of 16 greedy answers to heldout have no verdict" in outcome.stderr
        assert (
            f"allow more. Step {step} is trained and saved, and lacks its evaluation alone: the same" in outcome.stderr
        )
        assert "Traceback" not in outcome.output
    for (rows, checkpoints, has_ended), step in zip(left, (4, 4, 6), strict=True):
        assert [row["step"] for row in rows] == list(range(step + 1))
        assert checkpoints[-1] == step
        assert not has_ended
        expected = {name for name in whole.rows[step] if not name.startswith("eval/")}
        assert set(rows[step]) == expected, "everything but the evaluation"
    between.expect(0)
    assert "going on from step 6" in run.expect(0).output
    assert_same_run(run, whole)
