"""Two metric files, step by step: equal, equal within a tolerance, or where they part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moerl.analysis.run_folder import METRICS_FILE, read_metrics

IGNORED = ("*_seconds", "*/seconds", "*_per_second", "perf/tflops", "perf/mfu")
"""Names that no two runs share: times and what is divided by them."""


@dataclass(frozen=True)
class Difference:
    """One metric at one step that is not the same in both files; None for a value that is null or missing."""

    step: int
    name: str
    left: float | None
    right: float | None
    reason: str
    """`differs`, `only in A`, `only in B` or `null in one`."""

    @property
    def size(self) -> float:
        """|left - right|; infinite where one has no number."""
        if self.left is None or self.right is None:
            return math.inf
        return abs(self.left - self.right)


@dataclass(frozen=True)
class Comparison:
    """What `compare_rows` found."""

    differences: list[Difference]
    """By step, then by name."""
    num_steps: int
    """Steps that both have."""
    num_values: int
    """Values that were compared."""
    only_left: list[int]
    """Steps that the right one lacks."""
    only_right: list[int]

    @property
    def is_equal(self) -> bool:
        """Same steps, same names, same values."""
        return not (self.differences or self.only_left or self.only_right)


def compare_files(left: Path, right: Path, *, tolerance: float = 0.0, ignore: Sequence[str] = ()) -> Comparison:
    """Compare two metric files, or the ones of two run folders.

    Raises:
        DataError: a file is missing or empty.
    """
    rows = [read_metrics(path / METRICS_FILE if path.is_dir() else path).rows for path in (left, right)]
    return compare_rows(rows[0], rows[1], tolerance=tolerance, ignore=ignore)


def compare_rows(
    left: Iterable[Mapping[str, Any]],
    right: Iterable[Mapping[str, Any]],
    *,
    tolerance: float = 0.0,
    ignore: Sequence[str] = (),
) -> Comparison:
    """Compare records by step.

    Args:
        left: records of the first run (A).
        right: records of the second run (B).
        tolerance: two values are equal where |a - b| <= tolerance * max(1, |a|, |b|); 0 is exact.
        ignore: patterns (`*` also matches `/`) of names to leave out, beside `IGNORED`.
    """
    rows_left = {row["step"]: row for row in left}
    rows_right = {row["step"]: row for row in right}
    patterns = (*IGNORED, *ignore)
    shared = sorted(rows_left.keys() & rows_right.keys())
    differences: list[Difference] = []
    num_values = 0
    for step in shared:
        a, b = rows_left[step], rows_right[step]
        for name in sorted((a.keys() | b.keys()) - {"step"}):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                continue
            num_values += 1
            reason = _reason(a, b, name, tolerance)
            if reason:
                differences.append(Difference(step, name, a.get(name), b.get(name), reason))
    return Comparison(
        differences=differences,
        num_steps=len(shared),
        num_values=num_values,
        only_left=sorted(rows_left.keys() - rows_right.keys()),
        only_right=sorted(rows_right.keys() - rows_left.keys()),
    )


def comparison_table(comparison: Comparison, *, max_rows: int = 20) -> RenderableType:
    """The verdict, and every name that differs: where it first does, both values there, and the largest difference."""
    compared = f"{comparison.num_steps} steps, {comparison.num_values} values compared"
    if comparison.is_equal:
        return Text(f"equal: {compared}")
    parts: list[RenderableType] = []
    for label, steps in (("A", comparison.only_left), ("B", comparison.only_right)):
        if steps:
            parts.append(Text(f"{len(steps)} steps only in {label}: {_steps_text(steps)}"))
    first: dict[str, Difference] = {}
    largest: dict[str, float] = {}
    for difference in comparison.differences:
        first.setdefault(difference.name, difference)
        largest[difference.name] = max(largest.get(difference.name, 0.0), difference.size)
    if first:
        table = Table(box=box.SIMPLE_HEAD, title="first differences, by step", title_justify="left")
        for column in ("step", "metric", "A", "B", "|A - B|", "largest over the run", ""):
            table.add_column(column, justify="left" if column in ("metric", "") else "right", overflow="fold")
        for difference in list(first.values())[:max_rows]:
            name = difference.name
            values = map(_text, (difference.left, difference.right, difference.size, largest[name]))
            table.add_row(str(difference.step), name, *values, difference.reason)
        parts.append(table)
    if len(first) > max_rows:
        parts.append(Text(f"... and {len(first) - max_rows} more metrics"))
    parts.append(Text(f"DIFFERENT: {len(comparison.differences)} values of {len(first)} metrics; {compared}"))
    return Group(*parts)


def _reason(a: Mapping[str, Any], b: Mapping[str, Any], name: str, tolerance: float) -> str:
    if name not in b:
        return "only in A"
    if name not in a:
        return "only in B"
    x, y = a[name], b[name]
    if x is None or y is None:
        return "" if x is y else "null in one"
    return "" if abs(x - y) <= tolerance * max(1.0, abs(x), abs(y)) else "differs"


def _text(value: float | None) -> str:
    return "-" if value is None or math.isinf(value) else repr(value) if abs(value) >= 1e-3 else f"{value:.3e}"


def _steps_text(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{steps[0]} ... {steps[-1]}"
