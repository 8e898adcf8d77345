"""A run folder as the CPU demo leaves it, with curves like the measured ones.

`python fake_run.py FOLDER [LAYERS EXPERTS]` writes one to look at.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

HOSTILE = "<script>alert('x')</script> & \"quotes\" <b>bold</b>"


def write_fake_run(
    folder: Path, *, num_steps: int = 100, num_layers: int = 2, num_experts: int = 16, finished: bool = True
) -> Path:
    """Write metrics, samples, load, config and (if finished) summary; deterministic."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    metrics = [{"step": 0, **_evaluation(0, num_steps)}]
    metrics += [_step(step, num_steps, num_layers, rng) for step in range(1, num_steps + 1)]
    _write_lines(folder / "metrics.jsonl", metrics)
    _write_lines(folder / "samples.jsonl", [s for step in range(1, num_steps + 1) for s in _samples(step, rng)])
    visits = [row for step in range(1, num_steps + 1) for row in _visits(step, num_steps)]
    _write_lines(folder / "pass_rates.jsonl", visits)
    base = rng.gamma(30.0, 1.0, (num_layers, num_experts))
    drift = rng.normal(0, 0.25, base.shape)
    load = []
    for step in range(1, num_steps + 1):
        raw = base * np.exp(drift * step / num_steps)
        load.append({"step": step, "load": (raw / raw.sum(1, keepdims=True)).tolist()})
    _write_lines(folder / "load.jsonl", load)
    config = (
        f"run:\n  name: {folder.name}\n  seed: 0\n  num_steps: {num_steps}\nalgorithm:\n  preset: gspo  # <tag> & co\n"
    )
    (folder / "config.yaml").write_text(config)
    if finished:
        versions = {"python": "3.11.9", "torch": "2.13.0", "megatron-core": "0.19.2"}
        summary = {"steps": num_steps, "seconds": 83.4, "seed": 0, "versions": versions}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _evaluation(step: int, num_steps: int) -> dict[str, float]:
    gain = 1 - math.exp(-step / (0.12 * num_steps))
    greedy, sampled = 0.152 + 0.80 * gain, 0.289 + 0.60 * gain
    return {
        "eval/accuracy_greedy": greedy,
        "eval/accuracy_sampled": sampled,
        "eval/pass@2": min(1.0, sampled * 1.12),
        "eval/maj@3": min(1.0, sampled * 1.2),
        "eval/best_by_logprob@2": min(1.0, sampled * 1.1),
        "eval/sum/accuracy_greedy": greedy,
        "eval/sum_long/accuracy_greedy": greedy * 0.7,
    }


def _answers(gain: float) -> dict[str, float]:
    return {
        "rollout/response_length_right": 20 + 8 * gain,
        "rollout/response_length_wrong": 6 + 20 * gain,
        "rollout/distinct_2": 0.41 - 0.2 * gain,
        "rollout/distinct_fraction": 0.73 - 0.3 * gain,
        "rollout/token_prob": 0.88 + 0.1 * gain,
        "rollout/reflection_fraction": 0.0,
        "reward/group_std": 0.42 - 0.3 * gain,
        "reward/group_range": 0.97 - 0.5 * gain,
        "data/never_passed_fraction": 0.3 - 0.2 * gain,
        "data/always_passed_fraction": 0.6 * gain,
    }


def _step(step: int, num_steps: int, num_layers: int, rng: np.random.Generator) -> dict[str, float]:
    gain = 1 - math.exp(-step / (0.10 * num_steps))
    row: dict[str, float] = _answers(gain) | {
        "step": step,
        "reward/mean": 0.3 + 0.58 * gain + rng.normal(0, 0.03),
        "reward/exact": 0.3 + 0.55 * gain + rng.normal(0, 0.03),
        "reward/format": 0.8 + 0.19 * gain + rng.normal(0, 0.01),
        "rollout/response_length": 13 + 15 * gain + rng.normal(0, 0.5),
        "pg/entropy": 0.13 - 0.11 * gain + abs(rng.normal(0, 0.005)),
        "pg/clip_low": 0.03 + abs(rng.normal(0, 0.01)),
        "pg/clip_high": 0.04 + abs(rng.normal(0, 0.01)),
        "pg/kl_old": 1.3e-4 + abs(rng.normal(0, 3e-5)),
        "optim/grad_norm": 0.4 + abs(rng.normal(0, 0.1)),
        "optim/lr": 1.5e-4 * min(1.0, step / 5),
        "mm/k3": 10 ** rng.normal(-13, 0.3),
        "mm/logp_abs_mean": 10 ** rng.normal(-7.5, 0.1),
        "mm/logp_abs_max": 10 ** rng.normal(-6, 0.2),
        "mm/extreme_1.5": 0.0,
        "mm/extreme_2": 0.0,
        "mm/ess_token": 1.0,
        "mm/ess_seq": 1.0,
        "load/cv": 0.18 + 0.05 * gain + rng.normal(0, 0.005),
        "load/max": 1.35 + 0.2 * gain + rng.normal(0, 0.02),
        "load/min": 0.7 - 0.1 * gain + rng.normal(0, 0.02),
        "load/dead": 0.0,
        "pg/ratio_mean": 1.0 + rng.normal(0, 1e-9),
        "advantage/zero_variance_groups": 4.0 + 6.0 * gain,
        "reward/verifier_timeout": 0.0,
        "loss": rng.normal(0, 1e-3),
        "perf/rollout_seconds": 0.30 + abs(rng.normal(0, 0.02)),
        "perf/score_seconds": 0.08 + abs(rng.normal(0, 0.01)),
        "perf/update_seconds": 0.32 + abs(rng.normal(0, 0.02)),
        "perf/publish_seconds": 0.01,
        "perf/step_seconds": 0.8,
        "perf/rollout_tokens_per_second": 24_000 + rng.normal(0, 800),
        "perf/learn_tokens_per_second": 17_000 + rng.normal(0, 500),
    }
    for prefix, size in (
        ("route", 0.0),
        ("route_update", 0.0052),
        ("route_probe", 0.0051),
        ("route_long", 0.08 * gain),
    ):
        change = size + (abs(rng.normal(0, 4e-4)) if size else 0.0)
        row[f"{prefix}/expert_change"] = change
        row[f"{prefix}/set_change"] = 2 * change
        row[f"{prefix}/any_layer"] = 3.8 * change
        for layer in range(num_layers):
            row[f"{prefix}/expert_change/layer_{layer:03d}"] = change * (0.8 + 0.4 * layer / max(1, num_layers - 1))
    if step % 10 == 0:
        row |= _evaluation(step, num_steps) | {"perf/evaluate_seconds": 0.6}
    return row


def _visits(step: int, num_steps: int) -> list[dict[str, object]]:
    """Six prompts, each every second step: never, always, half the time, ever more often and ever less often solved."""
    gain = 8 * step // num_steps
    passed = {"never": 0, "always": 8, HOSTILE: gain, "late": max(0, gain - 4), "lost": 8 - gain, "half": 4}
    return [
        {"step": step, "prompt_id": f"sum/{name}", "answers": 8, "passed": number}
        for place, (name, number) in enumerate(passed.items())
        if (step + place) % 2
    ]


def _samples(step: int, rng: np.random.Generator) -> list[dict[str, object]]:
    a, b, c = (int(value) for value in rng.integers(1, 9, 3))
    good = {"prompt": f"{a}+{b}+{c}=?", "answer": str(a + b + c), "status": "ok", "finish_reason": "stop"}
    chain = f"{a}+{b}={a + b},{a + b}+{c}={a + b + c}\\boxed{{{a + b + c}}}<eos>"
    first = good | {"response": chain, "reward": 1.0, "components": {"exact": 1.0, "format": 1.0}, "length": 22}
    second = good | {"response": HOSTILE, "reward": 0.0, "components": {"exact": 0.0}, "length": 7}
    failed = {"reward": None, "status": "error", "error": "verifier ran past 5 s", "components": {}}
    third = good | {"response": "9" * 300, "length": 300, "finish_reason": "length"} | failed
    rows = [first, second] if step % 7 else [first, third]
    return [{"step": step, "prompt_id": f"sum/{step}", **row} for row in rows]


def _write_lines(path: Path, rows: list[dict[str, object]] | list[dict[str, float]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_fake_run(
        Path(sys.argv[1]),
        num_layers=int(sys.argv[2]) if len(sys.argv) > 2 else 2,
        num_experts=int(sys.argv[3]) if len(sys.argv) > 3 else 16,
    )
