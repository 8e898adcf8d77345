"""What a run does with numbers, verifiers and disks that fail: it says so, and damages nothing."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moerl.checkpoint import CheckpointStore
from moerl.data.dump import load_extra, load_step_batch
from moerl.run_folder import model_id

BLOW_UP = '''
"""Advantages that become infinite in the third step."""
from dataclasses import dataclass

import torch

from moerl.algorithms.registries import advantage_posts

steps = 0


@dataclass(frozen=True)
class BlowUpConfig:
    after: int = 2


@advantage_posts.register("blow_up", BlowUpConfig)
def blow_up(advantages, scored, cfg):
    global steps
    steps += 1
    return advantages * torch.inf if steps > cfg.after else advantages
'''

HOSTILE = '''
"""A verifier that dies, hangs or raises on some answers, in the sandbox and in the program itself."""
import os
import time
from dataclasses import dataclass

from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, judge


def verdict(text, gold):
    if text.endswith("1}"):
        os._exit(3)
    if text.endswith("2}"):
        time.sleep(60)
    if text.endswith("3}"):
        raise ValueError("no threes")
    return float(text.endswith("{" + gold + "}"))


@dataclass
class HostileConfig(RewardConfig):
    pass


@rewards.register("hostile", HostileConfig)
class Hostile:
    def __init__(self, config, pool):
        self.pool = pool

    async def score(self, prompt, text):
        if text.endswith("4}"):
            raise RuntimeError("no fours")
        return await judge(self.pool, "hostile_plugin:verdict", text=text, gold=prompt.answer)

    def check(self, prompts):
        return [None for _ in prompts]
'''

HOSTILE_OVERRIDES = (
    "reward.rewards=[{name: 'hostile_plugin:hostile'}]",
    "evaluation.sets=[]",  # of four held-out answers all may fail, which ends an evaluation
    "reward.timeout_seconds=0.3",
    "reward.num_workers=2",
    "rollout.prompts_per_step=8",
    "rollout.group_size=8",
    "run.num_steps=1",
)


def plugin(stage, name, text):
    folder = stage.moerl.folder / f"{name}_code"
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    return folder


def blown_up(stage):
    path = plugin(stage, "blow_plugin", BLOW_UP)
    post = ("algorithm.advantage.post={name: 'blow_plugin:blow_up'}", "checkpoint.interval_steps=2")
    return stage.moerl.train(stage.files.tiny, *post, name="blown_up", path=path)


def huge_steps(stage):
    """A learning rate that makes the weights overflow in one step: one minibatch, so that the next rollout sees it."""
    wrong = ("optim.lr=1e30", "optim.warmup_steps=0", "batch.num_minibatches=1")
    return stage.moerl.train(stage.files.tiny, *wrong, name="huge_steps")


def hostile(stage):
    path = plugin(stage, "hostile_plugin", HOSTILE)
    tolerant = (*HOSTILE_OVERRIDES, "reward.max_error_fraction=0.95", "telemetry.samples_per_step=8")
    patient = stage.moerl.train(stage.files.tiny, *tolerant, name="hostile_tolerated", path=path)
    strict = (*HOSTILE_OVERRIDES, "reward.max_error_fraction=0.01")
    return patient, stage.moerl.train(stage.files.tiny, *strict, name="hostile_refused", path=path)


def full_disk(stage):
    """The run folder on a disk that holds one checkpoint and not two; None where no disk can be mounted."""
    disk = stage.moerl.folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        return None
    try:
        run = stage.moerl.call("train", str(stage.files.tiny), f"run.output_dir={disk}", "run.name=full")
        store = CheckpointStore(disk / "full" / "checkpoints", keep=3, model_id=model_id("configs/demo/policy"))
        latest = store.latest(on_corrupt="refuse")
        return run, latest and latest.step, (disk / "full" / "metrics.jsonl").read_text().splitlines()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.runs.with_args(blown_up)
def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_batch(runs):
    run = runs[blown_up].expect(1)
    assert "moerl: step 3: minibatch 1 of " in run.stderr
    assert "no minibatch of this step was applied" in run.stderr
    assert "not finite" in run.stderr
    assert "Traceback" not in run.output
    path = Path(re.search(r"its batch is in (\S+\.npz)", run.stderr)[1])
    assert path == run.folder / "batches" / "step_000003.npz"
    batch = load_step_batch(path)
    assert batch.num_samples > 0
    assert any(not micro.advantages.isfinite().all() for mini in batch.minibatches for micro in mini)
    assert load_extra(path)["step"] == 3
    assert [row["step"] for row in run.rows] == [0, 1, 2]
    store = CheckpointStore(run.folder / "checkpoints", keep=3, model_id=model_id("configs/demo/policy"))
    assert store.steps() == [2]
    assert store.latest(on_corrupt="refuse").step == 2
    assert not (run.folder / "summary.json").exists()


@pytest.mark.runs.with_args(huge_steps)
def test_weights_that_overflowed_are_never_exported(runs):
    run = runs[huge_steps].expect(1)
    assert "Traceback" not in run.output
    assert re.search(r"moerl: step 2: 16 of 16 episodes failed, .*logits are not finite: .*has diverged", run.stderr)
    assert not (run.folder / "hf").exists()


@pytest.mark.runs.with_args(hostile)
def test_a_verifier_that_fails_marks_its_answers_and_never_gives_zero(runs):
    run, _ = runs[hostile]
    row = run.expect(0).rows[1]
    in_sandbox = sum(row[f"reward/verifier_{kind}"] for kind in ("crash", "timeout", "exception"))
    assert row["rollout/errors"] == in_sandbox + row["rollout/errors/RuntimeError"]
    assert row["reward/verifier_crash"] > 0
    assert row["reward/verifier_timeout"] > 0
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        is_hostile = sample["response"].endswith(("1}", "2}", "3}", "4}"))
        assert (sample["status"] == "error") == is_hostile
        assert (sample["reward"] is None) == is_hostile
        assert ("error" in sample) == is_hostile
    assert math.isfinite(row["loss"])


@pytest.mark.runs.with_args(hostile)
def test_too_many_failures_stop_the_run_with_their_kinds(runs):
    _, run = runs[hostile]
    run.expect(1)
    assert re.search(
        r"moerl: step 1: \d+ of 64 episodes failed, more than reward\.max_error_fraction=0\.01 allows", run.stderr
    )
    assert "hostile" in run.stderr
    assert not run.stderr.rstrip().endswith("Traceback")


@pytest.mark.runs.with_args(full_disk)
def test_a_full_disk_stops_the_run_and_spares_the_last_checkpoint(runs):
    found = runs[full_disk]
    if found is None:
        pytest.skip("mounting a tmpfs is not allowed here; tests/unit/test_checkpoint.py limits file sizes instead")
    run, latest, lines = found
    run.expect(1)
    assert re.search(r"moerl: cannot write checkpoint .*(No space left|os error 28)", run.stderr)
    assert "start the same command again" in run.stderr
    assert "Traceback" not in run.output
    assert latest == 1
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
