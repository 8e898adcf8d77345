"""`report.html`: a run on one page that needs no network, no script and no other file."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from moerl.analysis.charts import ANSWERS, LAYER, SECTIONS, Chart, Section
from moerl.analysis.key_figures import key_figures
from moerl.analysis.pass_rates import by_prompt, rate_map, telling
from moerl.analysis.plots import NUM_COLOURS, Series, heat_map, line_chart, with_own_ids
from moerl.analysis.run_folder import REPORT_FILE, RunData, read_run

MAX_SERIES = 16
"""Series in one chart; more cannot be told apart."""
MAX_LAYERS_AS_LINES = 6
"""Above it a chart by layer is a heat map."""
MAX_PROMPTS = 8
"""Prompts of each kind in the pass-rate table."""
MAX_SAMPLES = 24
"""Rollouts in the table: from the first, the middle and the last steps."""


@dataclass(frozen=True)
class LegendEntry:
    """One line below a chart."""

    colour: str
    """A CSS variable."""
    dashed: bool
    name: str
    text: str
    """Its values in words."""


@dataclass(frozen=True)
class Picture:
    """A chart as the template needs it."""

    title: str
    note: str
    svg: str
    legend: list[LegendEntry]


@dataclass(frozen=True)
class DrawnSection:
    """A section as the template needs it."""

    title: str
    note: str
    pictures: list[Picture]
    missing: list[str]
    """Titles of charts that this run has no metrics for."""


def write_report(run_folder: Path) -> Path:
    """Write `<run_folder>/report.html` in one move and return its path. A chart without data is left out with a note.

    Raises:
        DataError: not a run folder, or one without a record.
    """
    page = render_report(read_run(run_folder))
    path = run_folder / REPORT_FILE
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    temporary.replace(path)
    return path


def render_report(run: RunData) -> str:
    """The page as text; every string of the run is escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number_text
    environment.filters["share"] = lambda value: "–" if value is None else f"{value:.3f}"
    environment.filters["svg"] = Markup  # made by plots.py, which escapes what it is given
    template = environment.from_string(resources.files("moerl.analysis").joinpath("report.html.j2").read_text("utf-8"))
    series = _series_by_name(run)
    figures = key_figures(run.metrics)
    prompts = by_prompt(run.pass_rates)
    summary = run.summary
    if summary is not None and summary.get("steps") != figures["steps"]:
        summary = None  # of an earlier end: the run goes on to a later step
    return template.render(
        run=run,
        figures=figures,
        summary=summary,
        duration=_duration(summary),
        sections=[_draw_section(section, series, run) for section in SECTIONS],
        samples=_pick_samples(run.samples),
        num_prompts=len(prompts),
        telling_prompts=telling(prompts, MAX_PROMPTS),
        metrics_table=[_metric_row(one) for one in series.values()],
        num_colours=NUM_COLOURS,
    )


def number_text(value: Any) -> str:
    """A number for people: three digits; a dash for None."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size != 0 and size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.3g}"


def _series_by_name(run: RunData) -> dict[str, Series]:
    points: dict[str, tuple[list[int], list[float]]] = {}
    for row in run.metrics:
        step = row["step"]
        assert isinstance(step, int)
        for name, value in row.items():
            if name != "step":
                steps, values = points.setdefault(name, ([], []))
                steps.append(step)
                values.append(math.nan if value is None else float(value))
    return {name: Series(name, np.array(points[name][0]), np.array(points[name][1])) for name in sorted(points)}


def _draw_section(section: Section, series: dict[str, Series], run: RunData) -> DrawnSection:
    pictures: list[Picture] = []
    missing: list[str] = []
    for chart in section.charts:
        chosen = [series[name] for name in chart.select(series) if np.isfinite(series[name].values).any()]
        if chart.kind == "stack":
            chosen = [one for one in chosen if one.name != "perf/step_seconds"]
        if chosen:
            pictures.append(_draw_chart(chart, chosen))
        else:
            missing.append(chart.title)
    if section.title == ANSWERS:
        drawn = _draw_pass_rates(run)
        pictures += drawn
        missing += [] if drawn else ["Pass rates"]
    if section.title == "Expert load":
        drawn = _draw_load(run)
        pictures = drawn + pictures
        missing += [] if drawn else ["Load by layer and expert"]
    slug = section.title.lower().replace(" ", "-").replace("/", "")
    pictures = [
        Picture(one.title, one.note, with_own_ids(one.svg, f"{slug}-{index}"), one.legend)
        for index, one in enumerate(pictures)
    ]
    return DrawnSection(section.title, section.note, pictures, missing)


def _draw_chart(chart: Chart, chosen: Sequence[Series]) -> Picture:
    if chart.per_layer and len(chosen) > MAX_LAYERS_AS_LINES:
        return _draw_layers(chart, chosen)
    note = chart.note
    if len(chosen) > MAX_SERIES:
        note = f"{note} The first {MAX_SERIES} of {len(chosen)} are shown.".strip()
    shown = chosen[:MAX_SERIES]
    alt = f"{chart.title} by step. " + " ".join(f"{_label(chart, one)}: {_words(one)}." for one in shown)
    svg = line_chart(shown, kind=chart.kind, scale=chart.scale, smooth=chart.smooth, alt=alt)
    legend = [
        LegendEntry(f"--c{index % NUM_COLOURS}", index >= NUM_COLOURS, _label(chart, one), _words(one))
        for index, one in enumerate(shown)
    ]
    return Picture(chart.title, note, svg, legend)


def _label(chart: Chart, one: Series) -> str:
    return f"layer {_layer_of(one)}" if chart.per_layer else one.name


def _layer_of(one: Series) -> int:
    return int(one.name.rpartition(LAYER)[2])


def _draw_layers(chart: Chart, chosen: Sequence[Series]) -> Picture:
    """One metric of many layers as a heat map of layer over step; `chosen` are the layers in order."""
    steps = np.unique(np.concatenate([one.steps for one in chosen]))
    matrix = np.full((len(chosen), len(steps)), np.nan)
    for row, one in enumerate(chosen):
        matrix[row, np.searchsorted(steps, one.steps)] = one.values
    worst = _layer_of(chosen[int(np.nanargmax(np.nanmean(matrix, axis=1)))])
    alt = f"{chart.title}: {len(chosen)} layers, steps {steps[0]} to {steps[-1]}; largest in layer {worst}."
    is_dense = len(steps) == steps[-1] - steps[0] + 1
    x_label, x_start = ("step", int(steps[0])) if is_dense else ("record", 0)
    svg = heat_map(matrix, x_label=x_label, y_label="layer", x_start=x_start, alt=alt)
    return Picture(chart.title, f"{chart.note} Largest in layer {worst}.".strip(), svg, [])


def _draw_load(run: RunData) -> list[Picture]:
    """Heat maps of load by layer and expert, first and last, and how far every layer has moved since the first."""
    if not run.load:
        return []
    first_step, first = run.load[0][0], _load_matrix(run.load[0][1])
    alike = [(step, matrix) for step, load in run.load if (matrix := _load_matrix(load)).shape == first.shape]
    if len(alike) == 1:
        return [_load_picture(first_step, first, top=0.0)]
    top = float(np.nanmax([first, alike[-1][1]]))
    pictures = [_load_picture(step, matrix, top=top) for step, matrix in (alike[0], alike[-1])]
    steps = np.array([step for step, _ in alike])
    num_experts = np.isfinite(first).sum(axis=1)
    moved = np.stack([0.5 * np.nansum(np.abs(matrix - first), axis=1) / num_experts for _, matrix in alike], axis=1)
    chart = Chart(
        "Load moved since the start, by layer",
        f"Share of a layer's assignments that went to other experts at step {first_step}.",
        ("load_moved",),
        smooth=False,
        per_layer=True,
    )
    layers = [Series(f"load_moved{LAYER}{layer:03d}", steps, values) for layer, values in enumerate(moved)]
    return [*pictures, _draw_chart(chart, layers)]


def _draw_pass_rates(run: RunData) -> list[Picture]:
    """How the pass rates of each step's groups were spread."""
    if not any(row["answers"] for row in run.pass_rates):
        return []
    shares, starts = rate_map(run.pass_rates)
    note = (
        f"Share of the groups with each pass rate, in tenths. Never solved: {shares[0, 0]:.0%} → {shares[0, -1]:.0%}; "
        f"always: {shares[-1, 0]:.0%} → {shares[-1, -1]:.0%}."
    )
    is_dense = bool((np.diff(starts) == 1).all())
    x_label, x_start = ("step", int(starts[0])) if is_dense else ("part of the run", 0)
    alt = f"Pass rates from step {starts[0]} to {run.pass_rates[-1]['step']}. {note}"
    svg = heat_map(shares, x_label=x_label, y_label="pass rate, tenths", x_start=x_start, alt=alt)
    return [Picture("Pass rates", note, svg, [])]


def _load_matrix(load: Sequence[Sequence[float]]) -> np.ndarray:
    """[l][e] shares -> [l, e] load by an even share; NaN where a layer has fewer experts than the widest."""
    matrix = np.full((len(load), max(len(layer) for layer in load)), np.nan)
    for row, layer in enumerate(load):
        matrix[row, : len(layer)] = np.array(layer) * len(layer)
    return matrix


def _load_picture(step: int, matrix: np.ndarray, *, top: float) -> Picture:
    layer, expert = np.unravel_index(int(np.nanargmax(matrix)), matrix.shape)
    dead = int((matrix == 0).sum())
    note = (
        f"Busiest: expert {expert} of layer {layer}, {matrix[layer, expert]:.2f} times an even share. Unused: {dead}."
    )
    alt = f"Load of {matrix.shape[1]} experts in {matrix.shape[0]} layers at step {step}. {note}"
    svg = heat_map(matrix, x_label="expert", y_label="layer", alt=alt, even=1.0, top=top)
    return Picture(f"Load by layer and expert, step {step}", note, svg, [])


def _words(one: Series) -> str:
    known = one.values[np.isfinite(one.values)]
    if len(known) == 1:
        return number_text(float(known[0]))
    first, last, low, high = (float(value) for value in (known[0], known[-1], known.min(), known.max()))
    if low == high:
        return f"{number_text(low)} throughout"
    return f"{number_text(first)} → {number_text(last)} ({number_text(low)} to {number_text(high)})"


def _metric_row(one: Series) -> dict[str, Any]:
    known = one.values[np.isfinite(one.values)]
    numbers = [known[0], known[-1], known.min(), known.max(), known.mean()] if len(known) else []
    return {"name": one.name, "numbers": [float(x) for x in numbers] or [None] * 5, "count": len(known)}


def _pick_samples(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rollouts of the first, the middle and the last steps."""
    if len(samples) <= MAX_SAMPLES:
        return list(samples)
    third = MAX_SAMPLES // 3
    middle = (len(samples) - third) // 2
    return [*samples[:third], *samples[middle : middle + third], *samples[-third:]]


def _duration(summary: Mapping[str, Any] | None) -> str:
    seconds = summary.get("seconds") if summary else None
    if not isinstance(seconds, int | float):
        return ""
    return f"{seconds:.1f} s" if seconds < 120 else str(datetime.timedelta(seconds=round(seconds)))
