"""The demo learns: twenty steps of GSPO and forty of supervised training, with what such runs leave behind."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from statistics import fmean

import pytest
from safetensors import safe_open

from moerl.convert.compare import compare_weights
from moerl.convert.places import find

ROUTE_SETS = ("set_change", "expert_change", "jaccard", "any_layer", "layers_changed", "zero_deviation")
ROUTE_DISTANCES = ("kl", "js", "tv", "dev", "dev_p90", "dev_p99")
PROMISED = (
    *(f"route/{name}" for name in ROUTE_SETS),
    *(f"{pair}/{name}" for pair in ("route_update", "route_probe", "route_long") for name in ROUTE_SETS),
    *(f"{pair}/{name}" for pair in ("route_update", "route_probe", "route_long") for name in ROUTE_DISTANCES),
    *(f"load/{name}" for name in ("entropy", "cv", "max", "min", "dead")),
    *(f"mm/{what}_abs_{how}" for what in ("logp", "prob") for how in ("mean", "max")),
    *("mm/k1", "mm/k3", "mm/ess_token", "mm/ess_seq", "mm/chi2_token", "mm/chi2_seq", "mm/pearson_prob"),
    *(f"mm/extreme_{bound}" for bound in ("1.5", "2", "5", "10")),
    *("pg/clip_low", "pg/clip_high", "pg/entropy", "pg/kl_old", "reward/mean", "loss", "optim/lr", "optim/grad_norm"),
    *(f"perf/{phase}_seconds" for phase in ("rollout", "pack", "score", "update", "publish", "probe", "step")),
    *("perf/rollout_tokens_per_second", "perf/learn_tokens_per_second", "perf/tflops"),
)


@pytest.fixture(scope="module")
def gspo(runs):
    return runs["gspo20"]


@pytest.mark.runs("gspo20")
def test_the_demo_learns(gspo):
    summary = gspo.summary
    assert 0.10 <= summary["accuracy_before"] <= 0.20
    assert summary["accuracy_after"] >= 0.80
    assert summary["accuracy_sampled_after"] >= 0.65
    assert summary["accuracy_sampled_after"] - summary["accuracy_sampled_before"] >= 0.30
    rewards, lengths = gspo.values("reward/mean"), gspo.values("rollout/response_length")
    assert len(rewards) == len(lengths) == 20
    assert fmean(rewards[-5:]) - fmean(rewards[:3]) >= 0.25
    assert fmean(lengths[-5:]) - fmean(lengths[:3]) >= 6
    for pair in ("route_update", "route_probe"):
        drift = fmean(gspo.values(f"{pair}/expert_change"))
        assert 0 < drift < 0.03, pair
    assert gspo.values("route_long/expert_change")[-1] > gspo.values("route_long/expert_change")[0]


@pytest.mark.runs("gspo20")
def test_the_contract_holds_and_both_sides_agree_throughout(gspo):
    assert gspo.values("contract/holds") == [1.0]
    assert gspo.rows[1]["contract/holds"] == 1.0
    assert gspo.rows[1]["contract/logp_gap"] <= 1e-5
    assert gspo.rows[1]["contract/route_margin"] <= 1e-5
    assert gspo.rows[1]["contract/judged_fraction"] == 1.0
    assert gspo.rows[1]["mm/logp_abs_max"] <= 1e-5
    assert max(gspo.values("mm/k3")) < 1e-9
    assert max(gspo.values("contract/ratio_deviation")) <= 1e-5
    assert max(gspo.values("route/expert_change")) < 1e-3


@pytest.mark.runs("gspo20")
def test_every_promised_name_is_in_every_step(gspo):
    rows = gspo.rows
    assert [row["step"] for row in rows] == list(range(21))
    for row in rows[1:]:
        assert [name for name in PROMISED if row.get(name) is None] == []
    for row in rows[2:]:
        assert row["load/drift_tv"] >= 0
    for name in ("route/set_change", "route_update/dev", "load/entropy"):
        assert all(f"{name}/layer_{layer:03d}" in rows[1] for layer in (0, 1))
    evaluated = [row["step"] for row in rows if "eval/accuracy_greedy" in row]
    assert evaluated == [row["step"] for row in rows if "eval/accuracy_sampled" in row] == [0, 10, 20]
    assert all(isinstance(value, int | float) for row in rows for value in row.values())


@pytest.mark.runs("gspo20")
def test_the_summary_has_its_names(gspo):
    summary = gspo.summary
    assert summary["steps"] == 20
    assert summary["seed"] == 0
    assert summary["seconds"] > 0
    assert set(summary["versions"]) >= {"python", "torch", "megatron-core", "transformers", "moerl"}
    assert summary["accuracy_after"] == gspo.rows[-1]["eval/accuracy_greedy"]
    assert summary["accuracy_sampled_before"] == gspo.rows[0]["eval/accuracy_sampled"]
    assert len(summary["reward_by_quarter"]) == 4
    for text in ("held-out accuracy", "mean reward by quarter", "tokens/s, rollout", "route drift per update"):
        assert text in gspo.stdout
    assert str(gspo.folder) in "".join(gspo.stdout.split())
    assert gspo.stderr == ""


@pytest.mark.runs("gspo20")
def test_rollouts_can_be_read(gspo):
    samples = [json.loads(line) for line in (gspo.folder / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [step for step in range(1, 21) for _ in range(4)]
    for sample in samples:
        assert re.fullmatch(r"[0-9+\-]+=\?", sample["prompt"])
        assert sample["finish_reason"] in ("stop", "length")
        assert sample["reward"] == sample["components"]["math_verify"]
        if sample["reward"] == 1.0:
            assert sample["response"].endswith(f"\\boxed{{{sample['answer']}}}")
    assert sum("=" in sample["response"] for sample in samples[-20:]) > 10


@pytest.mark.runs("gspo20")
def test_the_report_needs_nothing_from_elsewhere(gspo):
    page = (gspo.folder / "report.html").read_text()
    loads = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)|url\(\s*["']?([^"')]+)|@import\s+["']?([^"';]+)""", page)
    assert [found for group in loads for found in group if found and not found.startswith(("data:", "#"))] == []
    assert "demo-gspo" in page or "gspo20" in page
    assert "<svg" in page


@pytest.mark.runs("gspo20")
def test_the_exported_weights_are_those_of_the_policy(gspo):
    with (
        safe_open(gspo.folder / "hf" / "model.safetensors", "pt") as now,
        safe_open("configs/demo/policy/model.safetensors", "pt") as before,
    ):
        assert sorted(now.keys()) == sorted(before.keys())
        assert all(now.get_tensor(name).shape == before.get_tensor(name).shape for name in now.keys())  # noqa: SIM118
    assert (gspo.folder / "hf" / "tokenizer.json").is_file()


@pytest.mark.runs("gspo20")
def test_exports_during_the_run_are_the_weights_of_its_checkpoints(gspo):
    assert sorted(path.name for path in (gspo.folder / "exports").iterdir()) == ["step_000010", "step_000020"]
    for step in ("step_000010", "step_000020"):
        export, checkpoint = (find(gspo.folder / kind / step) for kind in ("exports", "checkpoints"))
        assert not compare_weights(export, checkpoint).differences
    last = gspo.folder / "exports" / "step_000020" / "model.safetensors"
    assert last.read_bytes() == (gspo.folder / "hf" / "model.safetensors").read_bytes()


@pytest.mark.runs("sft40")
def test_supervised_training_learns(runs):
    losses = runs["sft40"].values("loss")
    assert len(losses) == 40
    assert losses[0] > 3.0
    assert fmean(losses[-5:]) < 1.8
    assert all(later < earlier for earlier, later in pairwise([fmean(losses[i : i + 10]) for i in (0, 10, 20, 30)]))
    assert runs["sft40"].values("reward/mean") == [1.0] * 40
    assert [name for row in runs["sft40"].rows for name in row if name.startswith("contract/clip")] == []


@pytest.mark.runs("sft10", "sft10_again", "sft40")
def test_supervised_training_is_the_same_twice_to_the_byte(runs):
    first, second = ((runs[name].folder / "hf" / "model.safetensors").read_bytes() for name in ("sft10", "sft10_again"))
    assert first == second
    assert first != (runs["sft40"].folder / "hf" / "model.safetensors").read_bytes()
