"""Verbalized sampling in whole runs of the demo, whose policy was never taught to verbalise."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moerl.build import build_run
from moerl.configure import load
from moerl.errors import ConfigError, RolloutError
from moerl.loop import train
from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, UnscoredError
from moerl.rewards.pool import SandboxPool
from moerl.types import Prompt

SMALL = (
    "run.num_steps=2",
    "rollout.prompts_per_step=4",
    "batch.num_minibatches=1",
    "evaluation.sets.0.limit=4",
    "evaluation.interval_steps=2",
    "telemetry.report=false",
    "telemetry.progress=off",
    "telemetry.probe_prompts=0",
)
SIZE = ("reward.rewards=[{name: size_of_test}]", "algorithm.preset=reinforce")
"""No baseline, so that every number above 0 has a gradient, the rest of its group whatever it may be."""
NODE = (
    "rollout.environment={name: verbalized, num_candidates: 2, prompt: '{question}', text_open: '[', text_close: ']', "
    "probability_open: '(', probability_close: ')'%s}"
)


class Size:
    """Reward of a number: a tenth of it. What is none has no verdict."""

    async def score(self, prompt: Prompt, text: str) -> float:
        if not text.isdigit():
            raise UnscoredError("exception", f"{text!r} is no number")
        return float(text) / 10.0

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return [None for _ in prompts]


@rewards.register("size_of_test", RewardConfig)
def size(config: RewardConfig, pool: SandboxPool) -> Size:
    return Size()


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    cfg = load("configs/demo/grpo.yaml", [*SMALL, *overrides, f"run.output_dir={folder}", "run.name=vs"])
    made = build_run(cfg)
    assert made is not None
    try:
        train(made.rooms, made.schedule, made.resume_from)
    finally:
        made.close()
    return [json.loads(line) for line in (folder / "vs" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("fraction", [1.0, 0.9])
def test_a_policy_that_cannot_verbalise_is_counted_and_trains_on_nothing(tmp_path: Path, fraction: float) -> None:
    overrides = (NODE % "", f"reward.max_error_fraction={fraction}")
    if fraction < 1.0:
        with pytest.raises(RolloutError, match=r"32 of 32 episodes failed.*verbalized_malformed"):
            run(tmp_path, *overrides)
        return
    rows = run(tmp_path, *overrides)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["rollout/verbalized_malformed"] == 1.0
        assert row["rollout/errors/verbalized_malformed"] == row["rollout/errors"] == 32.0
        assert row["rollout/filter/all_failed"] == 4.0
        assert row["optim/skipped_steps"] == 1.0
        assert "reward/mean" not in row
    assert rows[2]["eval/format_fraction_sampled"] > 0.0, "held-out tasks are asked plainly"
    assert rows[2]["eval/errors_sampled"] == 0.0


def test_responses_with_candidates_in_them_are_trained_on(tmp_path: Path) -> None:
    """Worked answers such as `7+6=13,13-5=8,8+9=17\\boxed{17}` hold one candidate, `8` with 17, under these markers."""
    node = (
        "rollout.environment={name: verbalized, num_candidates: 2, prompt: '{question}', text_open: ',', "
        "text_close: '+', probability_open: '=', probability_close: '\\boxed{'}"
    )
    rows = run(tmp_path, node, "reward.max_error_fraction=1.0", "rollout.prompts_per_step=8", *SIZE)
    for row in rows[1:]:
        assert 0.0 < row["rollout/verbalized_malformed"] < 1.0
        assert row["rollout/errors/verbalized_malformed"] == row["rollout/verbalized_malformed"] * 64
        assert row["rollout/verbalized_over_one"] > 0.0
        assert row["rollout/verbalized_distinct"] == row["rollout/verbalized_candidates"] > 0.0
        assert row["rollout/verbalized_entropy"] == 0.0
        assert row["reward/mean"] == row["reward/size_of_test"] > 0.0
        assert row["optim/grad_norm"] > 0.0


PLUS = (
    "rollout.environment={name: verbalized, num_candidates: 3, min_candidates: 2, prompt: '{question}', "
    "text_open: '+', text_close: '=', probability_open: '1', probability_close: ','}"
)
"""In a worked answer such as `9+8=17,17+1=18,18-5=13` each sum of ten and more is a candidate: `8` by 7, `1` by 8."""


def tasks(path: Path) -> str:
    """Tasks whose worked answers hold two sums between 10 and 19."""
    rows = []
    for a, b, c, d in itertools.product((9, 8), (8, 7, 6), (1, 2), (5, 3)):
        rows.append({"prompt": f"{a}+{b}+{c}-{d}=?", "answer": str(a + b + c - d)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train=[{{name: sums, source: {{name: file, path: {path}}}}}]"


def test_responses_of_several_candidates_get_the_mean_of_their_rewards(tmp_path: Path) -> None:
    """The policy's own tokens with its own logprobs; every record's reward is worked out again from its text."""
    data = (tasks(tmp_path / "sums.jsonl"), "rollout.prompts_per_step=16", "telemetry.samples_per_step=16")
    rows = run(tmp_path, PLUS, "reward.max_error_fraction=1.0", *data, *SIZE)
    several = 0
    for line in (tmp_path / "vs" / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        if sample["status"] != "ok":
            assert "verbalized malformed" in sample["error"]
            continue
        found = re.findall(r"\+([0-9])=1([0-9]),", sample["response"])[:3]
        total = sum(float(weight) for _, weight in found)
        assert len({answer for answer, _ in found}) >= 2
        assert total > 0
        wanted = sum(float(answer) / 10 * float(weight) / total for answer, weight in found)
        assert sample["reward"] == pytest.approx(wanted)
        several += 1
    assert several >= 3
    for row in rows[1:]:
        assert 0.0 < row["rollout/verbalized_malformed"] < 1.0
        assert row["rollout/verbalized_entropy"] > 0.0
        assert row["optim/grad_norm"] > 0.0
        assert row["optim/updates"] == 1.0
        assert row["mm/logp_abs_max"] < 1e-3, "what is trained on is what was sampled"


def test_the_files_completions_are_no_verbalised_answers() -> None:
    """Told without reading a file or a tokenizer."""
    node = "rollout.environment={name: verbalized, num_candidates: 1, min_candidates: 2}"
    with pytest.raises(ConfigError, match=r"num_candidates=1 must be 2 or more(?s:.*)rollout.engine=dataset answers"):
        load("configs/demo/sft.yaml", [node])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.environment=verbalized"], "cannot write '<text>', '</text>', '<probability>'"),
        ([(NODE % "").replace("num_candidates: 2", "num_candidates: 1")], "num_candidates=1 must be 2 or more"),
        ([(NODE % "").replace("text_open: '['", "text_open: ''")], "text_open is ''"),
        ([NODE % ", markers: 3"], "unknown key 'markers'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, *overrides)
