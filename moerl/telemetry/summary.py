"""`summary.json` and the table that ends a run: what was learnt, how fast, and what to open next."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moerl.analysis.key_figures import Row, key_figures
from moerl.analysis.run_folder import METRICS_FILE, REPORT_FILE, SAMPLES_FILE, SUMMARY_FILE


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
    """The key figures of a run and where they come from; a quantity that no record has is None.

    Args:
        metrics_rows: the records of metrics.jsonl, in any order; step 0 is the evaluation before the first update.
        seed: `run.seed`.
        seconds: wall time of the run, over resumes where the caller knows it.
        versions: `package_versions()`.
        folder: the run folder.
    """
    return {
        **key_figures(metrics_rows),
        "seconds": round(seconds, 3),
        "seed": seed,
        "versions": dict(versions),
        "folder": str(folder),
    }


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    """Write `<folder>/summary.json` in one move, so that a reader never sees half of it; returns its path."""
    path = folder / SUMMARY_FILE
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def summary_table(summary: Mapping[str, Any]) -> RenderableType:
    """What `moerl train` prints last, made from what `build_summary` returned."""
    accuracy = Table(title="Run summary", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    accuracy.add_column("held-out accuracy")
    accuracy.add_column("before", justify="right")
    accuracy.add_column("after", justify="right")
    for label, key in (("greedy", "accuracy"), ("sampled", "accuracy_sampled")):
        accuracy.add_row(label, _share(summary[f"{key}_before"]), _share(summary[f"{key}_after"]))
    folder = Path(summary["folder"])
    facts = Table.grid(padding=(0, 2))
    rewards = summary["reward_by_quarter"]
    lines = [
        ("mean reward by quarter", "  ".join(map(_share, rewards)) if any(r is not None for r in rewards) else None),
        ("tokens/s, rollout", _number(summary["rollout_tokens_per_second"], ",.0f")),
        ("tokens/s, learning", _number(summary["learn_tokens_per_second"], ",.0f")),
        ("TFLOP/s a device, learning", _number(summary["learn_tflops"], ",.3g")),
        ("route drift per update", _number(summary["route_drift_per_update"], ".2%", " of the expert slots")),
        ("steps", f"{summary['steps']} in {summary['seconds']:.1f} s, seed {summary['seed']}"),
        ("run folder", str(folder)),
        ("open next", _open_next(folder)),
    ]
    for label, text in lines:
        if text is not None:
            facts.add_row(Text(f"  {label}", style="dim"), Text(text, overflow="fold"))
    return Group(accuracy, facts)


def _open_next(folder: Path) -> str:
    report = folder / REPORT_FILE
    if report.exists():
        return f"{report} in a browser"
    return f"{folder / METRICS_FILE} and {SAMPLES_FILE}; `moerl report {folder}` makes {REPORT_FILE}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else format(value, form) + unit
