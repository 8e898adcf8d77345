"""Reading a run folder as it may be found: still being written, interrupted, with a torn line, with files missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moerl.errors import DataError

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
LOAD_FILE = "load.jsonl"
PASS_RATES_FILE = "pass_rates.jsonl"
SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
TRACE_FILE = "trace.json"
OLD_TRACE_FILE = "trace.1.json"

MAX_PROBLEMS = 20
"""Problems that are told one by one, per file."""


@dataclass(frozen=True)
class Records:
    """The records of one JSONL file in order of their step, and what was wrong with the others."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Each has an integer `step`."""
    problems: list[str] = field(default_factory=list)
    """One sentence each, with file and line."""


@dataclass(frozen=True)
class RunData:
    """Everything of a run folder that a report needs."""

    folder: Path
    metrics: list[dict[str, float | None]]
    """One per step, steps rising: `step`, then metrics by name; None where a value was not finite."""
    samples: list[dict[str, Any]]
    """Several per step."""
    load: list[tuple[int, list[list[float]]]]
    """(step, share of its layer's assignments by layer and expert)."""
    pass_rates: list[dict[str, Any]]
    """One per completed group: `step`, `prompt_id`, `answers`, `passed`."""
    summary: Mapping[str, Any] | None
    """None while the run goes on, or where it never ended."""
    config_text: str
    """config.yaml as it is; empty where it is missing."""
    problems: list[str]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name


def read_run(folder: Path) -> RunData:
    """Read a run folder; only `metrics.jsonl` must be there.

    Raises:
        DataError: no such folder, or no metrics in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder{_runs_near(folder.parent)}")
    if not (folder / METRICS_FILE).is_file():
        raise DataError(f"{folder}: not a run folder, it has no {METRICS_FILE}{_runs_near(folder)}")
    metrics = read_metrics(folder / METRICS_FILE)
    samples = _optional_records(folder / SAMPLES_FILE)
    load, load_problems = _read_load(folder / LOAD_FILE)
    rates = _read_pass_rates(folder / PASS_RATES_FILE)
    summary, summary_problems = _read_summary(folder / SUMMARY_FILE)
    config = folder / CONFIG_FILE
    return RunData(
        folder=folder,
        metrics=metrics.rows,
        samples=samples.rows,
        load=load,
        pass_rates=rates.rows,
        summary=summary,
        config_text=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        problems=[*metrics.problems, *samples.problems, *load_problems, *rates.problems, *summary_problems],
    )


def read_metrics(path: Path) -> Records:
    """A metrics file: one record per step (of two with the same step the later counts), values numbers or None.

    Raises:
        DataError: the file is missing or holds no record.
    """
    records = read_records(path)
    by_step: dict[int, dict[str, Any]] = {}
    problems = list(records.problems)
    for row in records.rows:
        step = row["step"]
        if step in by_step:
            problems.append(f"{path}: step {step} is there twice; the later record counts")
        wrong = [name for name, value in row.items() if not _is_number(value)]
        if wrong:
            problems.append(f"{path}: step {step}: {wrong[0]!r} is {row[wrong[0]]!r}, not a number; left out")
        by_step[step] = {name: value for name, value in row.items() if name not in wrong}
    return Records(list(by_step.values()), _shortened(problems, path))


def read_records(path: Path) -> Records:
    """Records of a JSONL file, sorted by step (stable). A line that is no record is a problem, not an error.

    Raises:
        DataError: the file is missing, cannot be read, or holds no record.
    """
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a run's {path.name}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row, fault = _parse(line)
        if row is not None:
            rows.append(row)
        elif number == len(lines):
            problems.append(f"{path}:{number}: the last line is torn (the run was killed or is writing it); left out")
        else:
            problems.append(f"{path}:{number}: {fault}; left out")
    if not rows:
        raise DataError(f"{path}: holds no record yet; a record is written after the first evaluation or step")
    rows.sort(key=lambda row: row["step"])
    return Records(rows, _shortened(problems, path))


def _parse(line: bytes) -> tuple[dict[str, Any] | None, str]:
    try:
        row = json.loads(line)
    except ValueError:
        return None, "not JSON"
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None, "not an object with an integer `step`"
    return row, ""


def _optional_records(path: Path) -> Records:
    """As `read_records`; a missing or empty file is no records."""
    if not path.is_file() or path.stat().st_size == 0:
        return Records()
    return read_records(path)


def _read_load(path: Path) -> tuple[list[tuple[int, list[list[float]]]], list[str]]:
    records = _optional_records(path)
    problems = list(records.problems)
    load: list[tuple[int, list[list[float]]]] = []
    for row in records.rows:
        if _is_load(row.get("load")):
            load.append((row["step"], row["load"]))
        else:
            problems.append(f"{path}: step {row['step']}: `load` is not a list of layers of numbers; left out")
    return load, _shortened(problems, path)


def _read_pass_rates(path: Path) -> Records:
    records = _optional_records(path)
    wrong = sum(not is_visit(row) for row in records.rows)
    problems = [f"{path}: {wrong} records are no prompt with answers and passed; left out"] if wrong else []
    return Records([row for row in records.rows if is_visit(row)], [*records.problems, *problems])


def is_visit(row: Mapping[str, Any]) -> bool:
    """Whether a record of `pass_rates.jsonl` is whole."""
    answers, passed = row.get("answers"), row.get("passed")
    if not isinstance(answers, int) or not isinstance(passed, int) or isinstance(answers, bool):
        return False
    return isinstance(row.get("prompt_id"), str) and not isinstance(passed, bool) and 0 <= passed <= answers


def _is_load(layers: Any) -> bool:
    return (
        isinstance(layers, list)
        and bool(layers)
        and all(isinstance(layer, list) and layer and all(map(_is_number, layer)) for layer in layers)
        and all(share is not None for layer in layers for share in layer)
    )


def _read_summary(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    if not path.is_file():
        return None, []
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None, [f"{path}: not JSON; left out"]
    if not isinstance(summary, dict):
        return None, [f"{path}: not an object; left out"]
    return summary, []


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _shortened(problems: list[str], path: Path) -> list[str]:
    rest = len(problems) - MAX_PROBLEMS
    return problems if rest <= 0 else [*problems[:MAX_PROBLEMS], f"{path}: {rest} more problems of this kind"]


def _runs_near(folder: Path) -> str:
    """A hint: the run folders inside `folder`."""
    names = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}")) if folder.is_dir() else []
    return f"; {folder} has: {', '.join(names[:8])}" if names else "; name the folder that `moerl train` printed"
