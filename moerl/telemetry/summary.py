"""`summary.json` and the table that ends a run: what was learnt, how fast, and what to open next."""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moerl.telemetry.sinks import METRICS_FILE, SAMPLES_FILE

SUMMARY_FILE = "summary.json"
Row = Mapping[str, Any]
"""One record of metrics.jsonl: `step` and metrics by name, None where a value was not finite."""


def package_versions() -> dict[str, str]:
    """Versions of what decides a run's numbers; a package that is not installed is left out."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "megatron-core", "transformers", "moerl"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def build_summary(
    metrics_rows: Iterable[Row], *, seed: int, seconds: float, versions: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """Summary of a run from its metric records, in any order; a quantity that no record has is None.

    Args:
        metrics_rows: step 0 is the evaluation before the first update; row `step: i` is after the i-th.
        seed: `run.seed`.
        seconds: wall time of the run, over resumes where the caller knows it.
        versions: `package_versions()`.
        folder: the run folder.
    """
    rows = sorted(metrics_rows, key=lambda row: row["step"])
    trained = [row for row in rows if row["step"] > 0]
    before = [row for row in rows if row["step"] == 0]
    return {
        "accuracy_before": _last(before, "eval/accuracy_greedy"),
        "accuracy_after": _last(trained, "eval/accuracy_greedy"),
        "accuracy_sampled_before": _last(before, "eval/accuracy_sampled"),
        "accuracy_sampled_after": _last(trained, "eval/accuracy_sampled"),
        "steps": trained[-1]["step"] if trained else 0,
        "seconds": round(seconds, 3),
        "seed": seed,
        "versions": dict(versions),
        "reward_by_quarter": _by_quarter(trained, "reward/mean"),
        "rollout_tokens_per_second": _rate(trained, "rollout", ("rollout",)),
        "learn_tokens_per_second": _rate(trained, "learn", ("score", "update")),
        "route_drift_per_update": _mean(_values(trained, "route_update/expert_change")),
        "folder": str(folder),
    }


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    """Write `<folder>/summary.json`, in one move, so that a reader never sees half of it; returns its path."""
    path = folder / SUMMARY_FILE
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105  the one call that is atomic on every system
    return path


def summary_table(summary: Mapping[str, Any]) -> RenderableType:
    """What `moerl train` prints last, made from what `build_summary` returned."""
    table = Table(title="Run summary", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for label, key in (("held-out accuracy, greedy", "accuracy"), ("held-out accuracy, sampled", "accuracy_sampled")):
        table.add_row(label, _text(summary[f"{key}_before"]), _text(summary[f"{key}_after"]))
    facts = Table.grid(padding=(0, 2))
    rewards = summary["reward_by_quarter"]
    lines = [
        ("mean reward by quarter", "  ".join(_text(value) for value in rewards) if any_of(rewards) else None),
        ("tokens/s, rollout", _number(summary["rollout_tokens_per_second"], ",.0f")),
        ("tokens/s, learning", _number(summary["learn_tokens_per_second"], ",.0f")),
        ("route drift per update", _number(summary["route_drift_per_update"], ".3%", " of expert slots changed")),
        ("steps, seconds, seed", f"{summary['steps']}, {summary['seconds']:.1f}, {summary['seed']}"),
        ("run folder", summary["folder"]),
        ("open next", _open_next(Path(summary["folder"]))),
    ]
    for label, text in lines:
        if text is not None:
            facts.add_row(Text(f" {label}"), Text(text, overflow="fold"))
    return Group(table, facts)


def any_of(values: Sequence[float | None]) -> bool:
    """Whether there is a number among `values`."""
    return any(value is not None for value in values)


def _open_next(folder: Path) -> str:
    report = folder / "report.html"
    if report.exists():
        return f"{report} in a browser"
    return f"{folder / METRICS_FILE}, {folder / SAMPLES_FILE}; `moerl report {folder}` makes report.html"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else format(value, form) + unit


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _last(rows: Sequence[Row], name: str) -> float | None:
    values = _values(rows, name)
    return values[-1] if values else None


def _by_quarter(rows: Sequence[Row], name: str) -> list[float | None]:
    """Means over the four quarters of the steps; a quarter without a value is None."""
    borders = [len(rows) * part // 4 for part in range(5)]
    return [_mean(_values(rows[start:end], name)) for start, end in itertools.pairwise(borders)]


def _rate(rows: Sequence[Row], name: str, phases: Sequence[str]) -> float | None:
    """Tokens by seconds over the whole run: the rates of the steps, weighted by the seconds they speak of."""
    tokens = seconds = 0.0
    for row in rows:
        rate = row.get(f"perf/{name}_tokens_per_second")
        spent = sum(row.get(f"perf/{phase}_seconds") or 0.0 for phase in phases)
        if rate is not None and spent > 0:
            tokens += rate * spent
            seconds += spent
    return tokens / seconds if seconds else None
