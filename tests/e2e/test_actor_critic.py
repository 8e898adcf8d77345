"""PPO and VAPO on the demo: a critic learns beside the policy; a teacher and a moving reference in whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from moerl.build import build_run
from moerl.configure import load
from moerl.errors import ConfigError
from moerl.loop import train

BASE = "configs/demo/base.yaml"
SMALL = (
    "run.num_steps=3",
    "rollout.prompts_per_step=4",
    "batch.num_minibatches=2",
    "evaluation.sets.0.limit=4",
    "evaluation.interval_steps=0",
    "telemetry.report=false",
    "telemetry.progress=off",
    "telemetry.probe_prompts=0",
    "checkpoint.interval_steps=1",
    "checkpoint.keep=5",
    "algorithm.critic.lr=1e-3",
)
PPO = ("algorithm.preset=ppo",)
VAPO = ("algorithm.preset=vapo", "algorithm.critic.pretrain_steps=1", "algorithm.advantage.gae_alpha=0.2")


def run(folder: Path, name: str, *overrides: str) -> tuple[Path, list[dict[str, Any]]]:
    cfg = load(BASE, [*SMALL, *overrides, f"run.output_dir={folder}", f"run.name={name}"])
    made = build_run(cfg)
    assert made is not None
    try:
        train(made.rooms, made.schedule, made.resume_from)
    finally:
        made.close()
    return folder / name, [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def same_weights(one: Path, other: Path) -> bool:
    """Safetensors files by their weights alone: the checkpoint also holds the state of the process's own RNGs."""
    first, second = load_file(one), load_file(other)
    names = [name for name in first if name.startswith(("model", "optimizer", "reference"))]
    assert names
    return all(bool((first[name] == second[name]).all()) for name in names)


@pytest.mark.parametrize(("name", "method"), [("ppo", PPO), ("vapo", VAPO)])
def test_it_runs_and_goes_on_bit_for_bit(tmp_path: Path, name: str, method: tuple[str, ...]) -> None:
    folder, rows = run(tmp_path, name, *method)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["contract/holds"] for row in rows if "contract/holds" in row] == [1.0]
    assert all(row["critic/grad_norm"] > 0 and row["critic/lr"] == 1e-3 for row in rows[1:])
    assert rows[1]["critic/value_mean"] == 0.0, "the head starts at 0"
    assert rows[3]["critic/value_mean"] > 0.0
    assert all(-1.0 <= row["critic/explained_variance"] <= 1.0 for row in rows[1:])
    assert all(row["advantage/mean"] == pytest.approx(0.0, abs=1e-6) for row in rows[1:]), "whitened over tokens"
    assert all(row["advantage/max"] > 0 > row["advantage/min"] for row in rows[1:])
    going_on = folder.with_name(f"{name}-again")
    shutil.copytree(folder, going_on)
    config = going_on / "config.yaml"
    config.write_text(config.read_text().replace(f"name: {name}\n", f"name: {name}-again\n"))
    for step in (2, 3):
        shutil.rmtree(going_on / "checkpoints" / f"step_{step:06d}")
    run(tmp_path, going_on.name, *method)
    for part in ("learner/rank_00000.safetensors", "learner/critic/rank_00000.safetensors"):
        last = Path("checkpoints/step_000003") / part
        assert same_weights(folder / last, going_on / last)


def test_value_pretraining_trains_the_critic_alone(tmp_path: Path) -> None:
    folder, rows = run(tmp_path, "vapo", *VAPO)
    assert [row["critic/is_pretraining"] for row in rows[1:]] == [1.0, 0.0, 0.0]
    assert "optim/grad_norm" not in rows[1]
    assert "optim/grad_norm" in rows[2]
    assert rows[1]["critic/return_mean"] == pytest.approx(rows[1]["reward/mean"], abs=0.3)
    first = load_file(folder / "checkpoints/step_000001/learner/rank_00000.safetensors")
    later = load_file(folder / "checkpoints/step_000002/learner/rank_00000.safetensors")
    policy = load_file("configs/demo/policy/model.safetensors")
    name = "weights/decoder.final_layernorm.weight@0"
    assert bool((first[name] == policy["model.norm.weight"]).all())
    assert not bool((first[name] == later[name]).all())


def test_a_critic_starts_from_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    folder, _ = run(tmp_path, "ppo", *PPO, "run.num_steps=1")
    _, rows = run(tmp_path, "next", *PPO, "run.num_steps=1", f"algorithm.critic.init={folder}/checkpoints/step_000001")
    assert rows[1]["critic/value_mean"] != 0.0


def test_a_teacher_and_a_reference_that_moves(tmp_path: Path) -> None:
    teacher = Path(shutil.copytree("configs/demo/policy", tmp_path / "teacher"))
    distilled = (
        "algorithm.preset=reinforce_pp",
        f"algorithm.teacher.path={teacher}",
        "algorithm.teacher.coefficient=0.5",
    )
    folder, rows = run(tmp_path, "distilled", *distilled, "algorithm.reference.update_every_steps=2")
    assert rows[1]["kl/teacher"] == pytest.approx(0.0, abs=1e-6), "the teacher is the policy's first weights"
    assert rows[3]["kl/teacher"] != pytest.approx(0.0, abs=1e-6)
    assert rows[1]["kl/reward"] == pytest.approx(0.0, abs=1e-6)
    assert abs(rows[2]["kl/reward"]) > 1e-6
    assert rows[3]["kl/reward"] == pytest.approx(0.0, abs=1e-6), "the reference moved to the policy after step 2"
    saved = load_file(folder / "checkpoints/step_000003/learner/rank_00000.safetensors")
    assert any(name.startswith("reference/") for name in saved)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.preset=ppo", "algorithm.critic.init=none"), "values come from a critic"),
        (("algorithm.preset=grpo", "algorithm.critic.init=policy"), "reads no values"),
        (("algorithm.preset=ppo", "algorithm.advantage.scale=group_std"), "GAE takes the plain reward"),
        (("algorithm.preset=ppo", "algorithm.level=seq_geo"), "GAE gives every token its own advantage"),
        (("algorithm.preset=grpo", "algorithm.advantage.gae_alpha=0.05"), "which has no lambda"),
        (("algorithm.preset=vapo", "algorithm.critic.pretrain_steps=3"), "the policy would never train"),
        (("algorithm.preset=ppo", "algorithm.advantage.gae_lambda=1.5"), "must be in [0, 1]"),
        (("algorithm.preset=ppo", "algorithm.critic.value_clip=0"), "above 0, or null"),
        (("algorithm.preset=gspo", "algorithm.teacher.path=x"), "the teacher gives every token its own advantage"),
        (("algorithm.preset=grpo", "algorithm.reference.ema=1.0"), "1 would never move it"),
        (("algorithm.preset=gspo", "algorithm.reference.update_every_steps=2"), "there is no reference to move"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE, [*SMALL, *overrides, "run.name=x"])
    assert message in str(caught.value)
