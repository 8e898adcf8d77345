from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from moerl.telemetry.summary import build_summary, package_versions, summary_table, write_summary

ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval/accuracy_greedy": 0.15, "eval/accuracy_sampled": 0.29},
    *(
        {
            "step": step,
            "reward/mean": step / 10,
            "route_update/expert_change": 0.004 if step % 2 else 0.006,
            "perf/rollout_seconds": float(step),
            "perf/rollout_tokens_per_second": 1000.0 / step,
            "perf/score_seconds": 1.0,
            "perf/update_seconds": 3.0,
            "perf/learn_tokens_per_second": 500.0,
            "perf/tflops": 0.25,
        }
        for step in range(1, 9)
    ),
]
ROWS[5] |= {"eval/accuracy_greedy": 0.9, "eval/accuracy_sampled": 0.8}
ROWS[8] |= {"reward/mean": None}


def _summary(rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    return build_summary(rows, seed=3, seconds=83.41234, versions={"torch": "2.13.0"}, folder=folder)


def test_summary_of_a_run(tmp_path: Path) -> None:
    summary = _summary(list(reversed(ROWS)), tmp_path)
    quarters = summary.pop("reward_by_quarter")
    assert [round(value, 12) for value in quarters] == [0.15, 0.35, 0.55, 0.7]
    assert abs(summary.pop("route_drift_per_update") - 0.005) < 1e-15
    assert abs(summary.pop("rollout_tokens_per_second") - 8000 / 36) < 1e-9
    assert summary == {
        "accuracy_before": 0.15,
        "accuracy_after": 0.9,
        "accuracy_sampled_before": 0.29,
        "accuracy_sampled_after": 0.8,
        "steps": 8,
        "learn_tflops": 0.25,
        "seconds": 83.412,
        "seed": 3,
        "versions": {"torch": "2.13.0"},
        "learn_tokens_per_second": 500.0,
        "folder": str(tmp_path),
    }


def test_what_a_run_does_not_have_is_none(tmp_path: Path) -> None:
    summary = _summary([{"step": 1, "pg/nll": 2.0}], tmp_path)
    assert summary["reward_by_quarter"] == [None] * 4
    assert [summary[key] for key in ("accuracy_before", "accuracy_after", "route_drift_per_update")] == [None] * 3
    assert _summary([], tmp_path)["steps"] == 0
    text = _printed(summary, width=100)
    assert "mean reward" not in text
    assert "tokens/s" not in text


def test_summary_file_reads_back(tmp_path: Path) -> None:
    summary = _summary(ROWS, tmp_path)
    path = write_summary(tmp_path, summary)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == summary
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_table_says_everything_and_what_to_open(tmp_path: Path) -> None:
    text = _printed(_summary(ROWS, tmp_path), width=400)
    for piece in ("0.150", "0.900", "0.150  0.350  0.550  0.700", "222", "500", "0.50%", "8 in 83.4 s, seed 3"):
        assert piece in text
    assert f"`moerl report {tmp_path}` makes report.html" in text
    (tmp_path / "report.html").write_text("")
    assert f"{tmp_path / 'report.html'} in a browser" in _printed(_summary(ROWS, tmp_path), width=400)


def test_versions_are_those_that_are_installed() -> None:
    import torch

    versions = package_versions()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "moerl"} <= set(versions)


def _printed(summary: dict[str, Any], *, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(summary_table(summary))
    return out.getvalue()
