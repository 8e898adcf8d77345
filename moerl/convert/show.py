"""What a person sees of a conversion: bytes and time left while it runs, tables afterwards."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from moerl.convert.compare import Difference, Verdict
from moerl.models.family import UNSUPPORTED, families
from moerl.models.rules import shorten

PIPE_WIDTH = 160
"""Columns where no terminal says how many it has; names of tensors fit."""
LINE_SECONDS = 10.0
"""Between two lines where there is no terminal."""


def console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


class ByteProgress:
    """A bar with rate and time left on a terminal, a line every few seconds elsewhere; on standard error."""

    def __init__(self, title: str, *, is_silent: bool = False) -> None:
        """`is_silent` for processes that do not speak."""
        self._title = title
        self._is_silent = is_silent
        self._lock = threading.Lock()
        self._done = self._total = self._first = 0
        self._started = self._spoke = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        """Nothing is shown before the size is known."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()

    def begin(self, total: int, done: int) -> None:
        """`total` bytes, of which `done` are there already."""
        self._total, self._done, self._first = total, done, done
        self._started = self._spoke = time.monotonic()
        err = Console(stderr=True)
        if self._is_silent or not err.is_terminal:
            return
        columns = (TextColumn(self._title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("left"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=err)
        self._task = self._bar.add_task(self._title, total=total, completed=done)
        self._bar.start()

    def advance(self, count: int) -> None:
        """`count` more bytes; from any thread."""
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
            elif not self._is_silent and time.monotonic() - self._spoke > LINE_SECONDS:
                self._spoke = time.monotonic()
                sys.stderr.write(self._line() + "\n")

    def _line(self) -> str:
        rate = (self._done - self._first) / max(1e-9, time.monotonic() - self._started)
        left = (self._total - self._done) / max(1.0, rate)
        return (
            f"{self._title}: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, "
            f"{left:.0f} s left"
        )


def comparison_table(verdict: Verdict, rows: int, said: Sequence[Difference] = ()) -> Table:
    """What differs: tensors, then what the models `said`."""
    table = Table("what", "difference")
    for difference in verdict.differences[:rows]:
        table.add_row(difference.name, difference.what)
    if len(verdict.differences) > rows:
        table.add_row("...", f"{len(verdict.differences) - rows} more (--rows)")
    for difference in said:
        table.add_row(difference.name, difference.what)
    return table


def show_model(found: Mapping[str, Any], out: Console, *, every_name: bool) -> None:
    """Print what `inspect_model` found."""
    out.print(f"[bold]{found['path']}[/bold]: {found['architecture']}, {_form(found)}", highlight=False)
    out.print(
        f"{found['parameters']:,} parameters, {found['active_parameters']:,} of them active for a token; "
        f"{sum(found['files'].values()) / 1e9:.3f} GB in {len(found['files'])} files; checksums: {found['checksums']}",
        highlight=False,
    )
    if found["quantised"]:
        block = found["quantised"].get("weight_block_size")
        size = f" in blocks of {block[0]} x {block[1]}" if block else ""
        out.print(
            f"stored as {found['quantised']['quant_method']}{size}; types below are what is read", highlight=False
        )
    out.print(count_table(("kind", "parameters"), found["parameters_by_kind"]))
    out.print(count_table(("type", "parameters"), found["parameters_by_dtype"]))
    out.print(_tensor_table(found["tensors"], every_name=every_name))
    carried = found["carried"]
    for kind, count in carried["parameters_by_kind"].items():
        age = ", older than its weights" if carried["is_older"] else ""
        out.print(
            f"carried as stored, not trained: {kind}, {count:,} values of {carried['from']}{age}", highlight=False
        )
    if carried["tensors"] and every_name:
        out.print(_tensor_table(carried["tensors"], every_name=True))
    for name, original in found["repeated"].items():
        out.print(f"held twice: {name} is a copy of {original}", highlight=False)
    if found["left_out"]:
        out.print(f"not part of the model: {shorten(found['left_out'])}", highlight=False)
    for line in found["damage"]:
        out.print(f"[red]damaged[/red]: {line}", highlight=False)


def _form(found: Mapping[str, Any]) -> str:
    if "layout" not in found:
        return "a Hugging Face folder"
    axes = told_axes({axis: size for axis, size in found["layout"].items() if axis != "dp"})
    kind = "a checkpoint of a run" if found["form"] == "run" else "a sharded checkpoint"
    return f"{kind}, cut by {axes or 'no axis'}"


def told_axes(layout: Mapping[str, int]) -> str:
    """What a layout cuts, by the names in its checkpoint; also a stage of one layer, which is no axis."""
    return ", ".join(f"{name} {n}" for name, n in layout.items() if n > 1 or name.endswith("_stage_layers"))


def count_table(titles: tuple[str, str], rows: Mapping[str, int]) -> Table:
    """Names and numbers."""
    table = Table(titles[0])
    table.add_column(titles[1], justify="right")
    for name, count in rows.items():
        table.add_row(name, f"{count:,}")
    return table


def _tensor_table(tensors: Mapping[str, Mapping[str, Any]], *, every_name: bool) -> Table:
    table = Table("shape", "type")
    table.add_column("alike", justify="right")
    table.add_column("tensor", overflow="fold")
    alike: Counter[tuple[str, str, str]] = Counter()
    for name, tensor in tensors.items():
        shown = name if every_name else re.sub(r"\.(layers|experts)\.\d+(?=\.)", r".\1.*", name)
        alike[shown, "x".join(map(str, tensor["shape"])), tensor["dtype"]] += 1
    for (name, shape, dtype), count in alike.items():
        table.add_row(shape, dtype, str(count), name)
    return table


def family_rows() -> list[dict[str, Any]]:
    """Every family, then what is not supported and why."""
    rows: list[dict[str, Any]] = []
    for name in families.names():
        traits = families.get(name).traits
        rows.append(
            {
                "family": name,
                "architectures": list(traits["architectures"]),
                "covers": list(traits["covers"]),
                "verified": traits["verified"],
            }
        )
    refused = ((name, f"not supported: {why}") for name, why in sorted(UNSUPPORTED.items()))
    return rows + [{"family": "", "architectures": [name], "covers": [], "verified": why} for name, why in refused]


def families_table(rows: list[dict[str, Any]]) -> Table:
    """`moerl convert --list`."""
    caption = (
        "all are read from FP8 (block, tensor, row), MXFP4 and 4-bit integers too; FP8 (block, tensor) is written "
        "where a file holds experts one by one"
    )
    table = Table("family", "architectures", "covers", "verified", caption=caption)
    for row in rows:
        table.add_row(row["family"], "\n".join(row["architectures"]), ", ".join(row["covers"]), row["verified"])
    return table
