"""Two steps of every method of token credit on the demo model, in one process; what they keep survives a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moerl.build import build_run
from moerl.configure import load
from moerl.errors import ConfigError
from moerl.loop import train
from moerl.rollout.engine import engines
from moerl.rollout.engines.local_engine import LocalEngine, LocalEngineConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "run.num_steps=2",
    "rollout.prompts_per_step=6",
    "rollout.group_size=4",
    "batch.num_minibatches=2",
    "evaluation.interval_steps=0",
    "evaluation.sets.0.limit=4",
    "telemetry.progress=off",
    "telemetry.report=false",
    "telemetry.probe_prompts=0",
    "checkpoint.interval_steps=0",
)

METHODS = {
    "rloo": ("algorithm.preset=rloo", {"kl/reward"}),
    "reinforce_pp": ("algorithm.preset=reinforce_pp", {"kl/reward"}),
    "reinforce_pp_baseline": ("algorithm.preset=reinforce_pp_baseline", {"kl/ref"}),
    "dcpo": ("algorithm.preset=dcpo", set()),
    "dr_grpo_ref_weighted": ("algorithm.preset=dr_grpo_ref_weighted", {"kl/ref"}),
    "lopti": ("algorithm.preset=lopti algorithm.routing=R2", {"kl/ref", "route/replay_coverage"}),
    "ar_lopti": ("algorithm.preset=ar_lopti", {"kl/ref"}),
    "group_dpo": ("algorithm.preset=group_dpo", {"dpo/accuracy", "dpo/margin"}),
    "scalerl": ("algorithm.preset=scalerl", {"rollout/prompts_passed_over"}),
    "trl_dr_grpo": ("algorithm.preset=trl/dr_grpo", set()),
    "verl_gspo": ("algorithm.preset=verl/gspo", set()),
    "ctpo": ("algorithm.preset=ctpo", {"pg/clip_high", "pg/clip_low"}),
    "minpro": ("algorithm.preset=minpro", {"pg/clip_high"}),
    "trm": ("algorithm.preset=trm", {"mm/reject_seq"}),
    "vaco": ("algorithm.preset=vaco", {"mm/reject"}),
    "dppo_topk_tv": ("algorithm.preset=dppo_topk_tv rollout.top_logprobs=5", {"pg/clip_low", "pg/clip_high"}),
    "dppo_topk_kl_r3": ("algorithm.preset=dppo_topk_kl algorithm.routing=R3", {"route/replay_coverage"}),
    "signed": ("algorithm.preset=reinforce_rej", {"reward/shaping_signed"}),
    "modifiers": ("algorithm.preset=gspo+tis_seq+r3", {"mm/weight_mean", "route/replay_coverage"}),
    "removal": (
        "algorithm.preset=icepop algorithm.correction.rejected=remove rollout.engine.precision=bf16",
        {"mm/removed_tokens", "mm/removed_seqs"},
    ),
    "adaptive": (
        "algorithm.preset=grpo algorithm.kl.target=0.01 algorithm.entropy.place=loss algorithm.entropy.target=9.0",
        {"kl/coefficient", "pg/entropy_coefficient"},
    ),
    "constants": (
        "algorithm.preset=grpo algorithm.token_weight=top_entropy algorithm.correction=tis "
        "algorithm.correction.batch_normalize=true algorithm.entropy.place=reward algorithm.entropy.coefficient=0.01",
        {"mm/weight_mean"},
    ),
    "likelihood": (
        "algorithm.preset=dapo algorithm.positive_nll.coefficient=0.1 algorithm.term_aggregation.nll=same",
        {"pg/positive_nll"},
    ),
    "chosen": (
        "algorithm.preset=grpo algorithm.filters=[{name:\\ duplicates,mode:\\ resample},{name:\\ top_k,k:\\ 2}]",
        {"advantage/masked_samples", "rollout/resampled"},
    ),
}


def words(text: str) -> list[str]:
    return [word.replace("\0", " ") for word in text.replace("\\ ", "\0").split()]


def run(folder: Path, name: str, *overrides: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Rows of metrics, and the weights at the end."""
    settings = [*SMALL, f"run.output_dir={folder}", f"run.name={name}", *overrides]
    made = build_run(load(ROOT / "configs" / "demo" / "base.yaml", settings))
    assert made is not None
    try:
        train(made.rooms, made.schedule, made.resume_from)
        weights = {key: tensor.detach().clone() for key, tensor in made.rooms.policy.export()}
    finally:
        made.close()
    return [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()], weights


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", METHODS)
def test_two_steps(tmp_path, name):
    text, expected = METHODS[name]
    rows, _ = run(tmp_path, name, *words(text))
    last = rows[-1]
    assert last["step"] == 2
    assert expected <= set(last)
    assert math.isfinite(last["loss"])
    assert last["optim/grad_norm"] > 0


def test_lopti_makes_two_updates_of_every_minibatch(tmp_path):
    """Of three minibatches six updates, none of them without a token; one policy version a step as ever."""
    for name, updates in (("lopti", 6.0), ("dapo", 3.0)):
        settings = (f"algorithm.preset={name}", "algorithm.filters=[]", "algorithm.refill_rounds=0")
        rows, _ = run(tmp_path, name, *settings, "batch.num_minibatches=3")
        assert [row["optim/updates"] for row in rows[1:]] == [updates, updates]
        assert all("optim/skipped_minibatches" not in row for row in rows)


def test_answers_that_are_sampled_anew_are_counted(tmp_path):
    """A nearly greedy policy repeats itself: up to three of four answers are copies, drawn again in both rounds."""
    node = "algorithm.filters=[{name: duplicates, mode: resample, rounds: 2}]"
    rows, _ = run(tmp_path, "copies", "algorithm.preset=reinforce", node, "rollout.temperature=0.2")
    drawn = [row["rollout/resampled"] for row in rows[1:]]
    assert all(0 < count <= 2 * 3 * 6 and count == int(count) for count in drawn)
    rows, _ = run(tmp_path, "plain", "algorithm.preset=reinforce", "rollout.temperature=0.2")
    assert all("rollout/resampled" not in row for row in rows)


REMEMBERS = {
    "dcpo": ("algorithm.preset=dcpo",),
    "adaptive": tuple(words(METHODS["adaptive"][0])),
    "scalerl": ("algorithm.preset=scalerl",),
}


@pytest.mark.parametrize("name", REMEMBERS)
def test_what_a_method_remembers_survives_a_restart(tmp_path, name):
    """Three steps in one go and in two give the same weights; the data are few enough for prompts to come again."""
    rows = (ROOT / "configs" / "demo" / "data" / "train.jsonl").read_text().splitlines()[:8]
    data = tmp_path / "few.jsonl"
    data.write_text("\n".join(rows) + "\n")
    few = f"data.train=[{{name: few, source: {{name: file, path: {data}}}}}]"
    settings = (few, *REMEMBERS[name], "checkpoint.interval_steps=2")
    _, once = run(tmp_path, "once", *settings, "run.num_steps=3")
    _, half = run(tmp_path, "twice", *settings, "run.num_steps=2")
    _, twice = run(tmp_path, "twice", *settings, "run.num_steps=3")
    assert all(torch.equal(once[key], twice[key]) for key in once)
    assert not all(torch.equal(once[key], half[key]) for key in once)


def test_an_engine_without_top_k_logprobs_is_refused_at_load():
    engines.register("mute", LocalEngineConfig)(LocalEngine)
    settings = [*SMALL, "run.name=x", "algorithm.preset=dppo_topk_tv"]
    load(ROOT / "configs" / "demo" / "base.yaml", settings)
    with pytest.raises(ConfigError, match=r"rollout\.engine 'mute' returns no top-k logprobs"):
        load(ROOT / "configs" / "demo" / "base.yaml", [*settings, "rollout.engine=mute"])


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_first_minibatch_of_a_run_drops_no_token_for_its_divergence(tmp_path, kind):
    """Trainer and engine have the same weights there, so the two distributions over the likeliest tokens are one."""
    settings = (f"algorithm.preset=dppo_topk_{kind}", "run.num_steps=1", "batch.num_minibatches=1")
    rows, _ = run(tmp_path, kind, *settings, "algorithm.trust.delta=1e-5")
    assert rows[-1]["pg/clip_low"] == rows[-1]["pg/clip_high"] == 0
    rows, _ = run(tmp_path, f"{kind}_int8", *settings, "algorithm.trust.delta=1e-5", "rollout.engine.precision=int8")
    assert rows[-1]["pg/clip_low"] + rows[-1]["pg/clip_high"] > 0.01
