"""What a person sees while a run goes on: a live display on a terminal, one line per step elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from moerl.errors import ConfigError

MODES = ("auto", "live", "plain", "off")

FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward/mean",), ".3f"),
    ("accuracy", ("eval/accuracy_greedy",), ".3f"),
    ("sampled", ("eval/accuracy_sampled",), ".3f"),
    ("loss", ("pg/loss", "loss"), ".4f"),
    ("KL", ("pg/kl_old", "mm/k3"), ".1e"),
    ("entropy", ("pg/entropy",), ".3f"),
    ("rollout tok/s", ("perf/rollout_tokens_per_second",), ",.0f"),
    ("learn tok/s", ("perf/learn_tokens_per_second",), ",.0f"),
)
"""Label, metric names (the first that is there counts), format."""

STICKY = ("accuracy", "sampled")
"""Fields that the live display keeps between the steps that have them."""


class Progress:
    """Context manager around the training loop. Nothing here can end a run: a closed pipe only makes it silent."""

    def __init__(
        self, total_steps: int, first_step: int = 1, mode: str = "auto", *, console: Console | None = None
    ) -> None:
        """`first_step` is the first step of this process (above 1 after a resume).

        Args:
            total_steps: last step of the run.
            first_step: see above.
            mode: `auto` (live on a terminal, plain elsewhere), `live`, `plain` or `off`.
            console: where to write; standard output by default.

        Raises:
            ConfigError: `mode` is none of these.
        """
        if mode not in MODES:
            raise ConfigError(f"telemetry.progress is {mode!r}; allowed: {', '.join(MODES)}")
        self.console = console or _QuietConsole(highlight=False)
        self._mode = ("live" if self.console.is_terminal else "plain") if mode == "auto" else mode
        self._total = total_steps
        self._first = first_step
        self._phase = ""
        self._values: dict[str, str] = {}
        self._last_time = time.monotonic()
        self._step_seconds: list[float] = []
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._moved_handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )
        self._task = self._bar.add_task("steps", total=total_steps, completed=first_step - 1)

    @property
    def mode(self) -> str:
        """`live`, `plain` or `off`."""
        return self._mode

    def __enter__(self) -> Self:
        """Start the display."""
        self._last_time = time.monotonic()
        if self._mode == "live":
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=8)
            self._live.start()
            self._move_log_handlers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the last state on the screen and give the terminal back."""
        if self._live is None:
            return
        self._phase = ""
        for handler, stream in self._moved_handlers:
            handler.setStream(stream)
        self._moved_handlers = []
        self._live.stop()
        self._live = None

    def phase(self, name: str) -> None:
        """Say what the run is doing now: rollout, score, update, publish, evaluate, ..."""
        self._phase = name

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """`step` is done (0: the evaluation before the first step); `values` are its metrics by name."""
        now = time.monotonic()
        if step > 0:
            self._step_seconds.append(now - self._last_time)
        self._last_time = now
        shown = _shown(values)
        kept = {key: text for key, text in self._values.items() if key in STICKY} | shown
        self._values = {label: kept[label] for label, _, _ in FIELDS if label in kept}
        self._bar.update(self._task, completed=step)
        if self._mode == "plain":
            fields = "  ".join(f"{label} {text}" for label, text in shown.items())
            self._line(f"step {step}/{self._total}  {fields}  {self._time_left(step)}".rstrip())

    def message(self, text: str) -> None:
        """A line of its own, above the display."""
        if self._mode != "off":
            self._line(text)

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()

    def _time_left(self, step: int) -> str:
        if not self._step_seconds or step >= self._total:
            return ""
        recent = self._step_seconds[-20:]
        return f"left {_clock_text(sum(recent) / len(recent) * (self._total - step))}"

    def _render(self) -> Group:
        grid = Table.grid(padding=(0, 2))
        cells = [Text.assemble((f"{label} ", "dim"), (text, "bold")) for label, text in self._values.items()]
        per_row = max(1, self.console.width // 22)
        for start in range(0, len(cells), per_row):
            grid.add_row(*cells[start : start + per_row])
        self._spinner.update(text=Text(self._phase, style="cyan"))
        parts = [self._bar, *([grid] if cells else []), *([self._spinner] if self._phase else [])]
        return Group(*parts)

    def _move_log_handlers(self) -> None:
        """Log handlers hold the real stderr and would tear the display; rich's stand-in prints above it."""
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler and handler.stream in (sys.__stderr__, sys.__stdout__):
                self._moved_handlers.append((handler, handler.stream))
                handler.setStream(sys.stderr)


class _QuietConsole(Console):
    """Falls silent where rich would end the process: `moerl train ... | head` must not stop the training."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  the interpreter flushes it at exit


def _shown(values: Mapping[str, float]) -> dict[str, str]:
    shown: dict[str, str] = {}
    for label, names, form in FIELDS:
        name = next((name for name in names if name in values), None)
        if name is not None:
            shown[label] = format(values[name], form)
    return shown


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
