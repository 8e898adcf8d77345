from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moerl.analysis.compare import Difference, compare_rows, comparison_table

TOOL = Path(__file__).parents[3] / "tools" / "compare_runs.py"

ROWS: list[dict[str, Any]] = [
    {"step": s, "reward/mean": s / 7, "pg/kl_old": 1e-4 * s, "bad": None, "perf/update_seconds": 0.1} for s in range(4)
]


def _changed(step: int, **values: Any) -> list[dict[str, Any]]:
    return [row | values if row["step"] == step else dict(row) for row in ROWS]


def test_equal_runs_are_equal_whatever_their_times() -> None:
    other = [
        row | {"perf/update_seconds": 9.0, "perf/rollout_tokens_per_second": 5.0, "perf/sync_seconds": 1.0}
        for row in ROWS
    ]
    comparison = compare_rows(ROWS, reversed(other))
    assert comparison.is_equal
    assert (comparison.num_steps, comparison.num_values) == (4, 12)


def test_one_bit_is_a_difference_and_a_tolerance_forgives_it() -> None:
    value = ROWS[2]["reward/mean"] * (1 + 2**-52)
    other = _changed(2, **{"reward/mean": value})
    comparison = compare_rows(ROWS, other)
    assert comparison.differences == [Difference(2, "reward/mean", 2 / 7, value, "differs")]
    assert compare_rows(ROWS, other, tolerance=1e-15).is_equal


@pytest.mark.parametrize(
    ("left", "right", "equal"), [(100.0, 100.0009, True), (100.0, 100.002, False), (0.0, 9e-6, True)]
)
def test_tolerance_is_relative_above_one_and_absolute_below(left: float, right: float, equal: bool) -> None:
    assert compare_rows([{"step": 1, "x": left}], [{"step": 1, "x": right}], tolerance=1e-5).is_equal is equal


def test_names_steps_and_nulls_that_one_lacks_are_differences() -> None:
    other = _changed(1, extra=1.0, bad=2.0)[:-1]
    del other[2]["pg/kl_old"]
    comparison = compare_rows(ROWS, other)
    assert [(d.step, d.name, d.reason) for d in comparison.differences] == [
        (1, "bad", "null in one"),
        (1, "extra", "only in B"),
        (2, "pg/kl_old", "only in A"),
    ]
    assert (comparison.only_left, comparison.only_right) == ([3], [])
    assert not compare_rows(ROWS, ROWS[:-1]).is_equal
    assert compare_rows(ROWS, _changed(1, extra=1.0, bad=2.0), ignore=["ex*", "bad"]).is_equal


def test_table_shows_the_first_step_and_the_largest_difference() -> None:
    other = [row | {"reward/mean": row["reward/mean"] + 0.25 * row["step"]} for row in ROWS]
    out = io.StringIO()
    Console(file=out, width=140).print(comparison_table(compare_rows(ROWS, other)))
    (line,) = [line for line in out.getvalue().splitlines() if "reward/mean" in line]
    assert line.split()[:2] == ["1", "reward/mean"]
    assert "0.25" in line
    assert "0.75" in line
    assert "DIFFERENT: 3 values of 1 metrics; 4 steps, 12 values compared" in out.getvalue()


def test_the_tool_says_and_returns_the_verdict(tmp_path: Path) -> None:
    for name, rows in (("a", ROWS), ("b", _changed(3, **{"reward/mean": 0.5}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), str(tmp_path / "a"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    same = run(str(tmp_path / "a" / "metrics.jsonl"))
    assert (same.returncode, same.stdout.strip()) == (0, "equal: 4 steps, 12 values compared")
    different = run(str(tmp_path / "b"))
    assert different.returncode == 1
    assert "reward/mean" in different.stdout
    assert run(str(tmp_path / "b"), "--ignore", "reward/*").returncode == 0
    missing = run(str(tmp_path / "c"))
    assert missing.returncode == 2
    assert "cannot be read" in missing.stderr
