from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.analysis.run_folder import read_metrics, read_records, read_run
from moerl.errors import DataError


def _write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + end)
    return path


def test_torn_and_foreign_lines_are_told_and_left_out(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "metrics.jsonl",
        '{"step": 2, "x": 2.0}',
        "not json",
        '{"x": 1}',
        '{"step": true}',
        "",
        '{"step": 1, "x": null}',
        '{"step": 3, "x"',
        end="",
    )
    records = read_records(path)
    assert records.rows == [{"step": 1, "x": None}, {"step": 2, "x": 2.0}]
    assert records.problems == [
        f"{path}:2: not JSON; left out",
        f"{path}:3: not an object with an integer `step`; left out",
        f"{path}:4: not an object with an integer `step`; left out",
        f"{path}:7: the last line is torn (the run was killed or is writing it); left out",
    ]


def test_of_two_records_of_a_step_the_later_counts_and_values_are_numbers(tmp_path: Path) -> None:
    path = _write(tmp_path / "metrics.jsonl", '{"step": 1, "x": 1.0}', '{"step": 1, "x": 2, "y": "high"}')
    records = read_metrics(path)
    assert records.rows == [{"step": 1, "x": 2}]
    assert records.problems == [
        f"{path}: step 1 is there twice; the later record counts",
        f"{path}: step 1: 'y' is 'high', not a number; left out",
    ]


def test_many_problems_are_counted(tmp_path: Path) -> None:
    path = _write(tmp_path / "samples.jsonl", *["x"] * 50, '{"step": 1}')
    problems = read_records(path).problems
    assert len(problems) == 21
    assert problems[-1] == f"{path}: 30 more problems of this kind"


def test_missing_things_say_what_to_name(tmp_path: Path) -> None:
    _write(tmp_path / "runs" / "demo" / "metrics.jsonl", '{"step": 1}')
    with pytest.raises(DataError, match=r"runs/dmo: no such run folder; .*runs has: demo$"):
        read_run(tmp_path / "runs" / "dmo")
    with pytest.raises(DataError, match=r"runs: not a run folder, it has no metrics.jsonl; .*runs has: demo$"):
        read_run(tmp_path / "runs")
    with pytest.raises(DataError, match=r"nowhere.jsonl: cannot be read \(No such file or directory\)"):
        read_records(tmp_path / "nowhere.jsonl")
    empty = _write(tmp_path / "empty" / "metrics.jsonl", end="")
    with pytest.raises(DataError, match="holds no record yet"):
        read_run(empty.parent)


def test_everything_but_metrics_may_be_missing_or_broken(tmp_path: Path) -> None:
    _write(tmp_path / "metrics.jsonl", '{"step": 1, "x": 1.0}')
    run = read_run(tmp_path)
    assert (run.samples, run.load, run.summary, run.config_text, run.problems) == ([], [], None, "", [])
    loads = [[[0.5, 0.5]], [], [[None]], "x", [["a"]]]
    _write(tmp_path / "load.jsonl", *[json.dumps({"step": i, "load": load}) for i, load in enumerate(loads)])
    _write(tmp_path / "summary.json", '{"steps": ')
    _write(tmp_path / "samples.jsonl", end="")
    run = read_run(tmp_path)
    assert run.load == [(0, [[0.5, 0.5]])]
    assert run.summary is None
    assert len(run.problems) == 5
    assert run.problems[-1] == f"{tmp_path / 'summary.json'}: not JSON; left out"
