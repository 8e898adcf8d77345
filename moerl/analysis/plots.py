"""Charts as SVG text for a page, in the page's colours, fonts and width, so that dark and small screens fit.

matplotlib draws (imported here only, 0.4 s). It is given marker colours that no chart would use; `_adopt` turns them
into CSS variables of the page: `--c0` to `--c7` for series, `--ink` for text, `--grid` for lines.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLOURS = 8
MIN_POINTS_TO_SMOOTH = 24
_INK, _GRID = "#00fe01", "#00fe02"
_SERIES = tuple(f"#00fe{index:02x}" for index in range(16, 16 + NUM_COLOURS))
_SIZE_INCHES = (4.8, 2.4)
_PLAIN, _WITH_BAR, _BAR = (0.13, 0.19, 0.86, 0.72), (0.09, 0.19, 0.77, 0.78), (0.88, 0.19, 0.03, 0.78)
"""Axes as (left, bottom, width, height) of the figure; matplotlib's own layouts cost as much time as the drawing."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moerl",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.useoffset": False,
    "axes.formatter.use_mathtext": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "path.simplify_threshold": 0.5,
}


@dataclass(frozen=True)
class Series:
    """One metric over the steps."""

    name: str
    steps: np.ndarray
    """[n] int."""
    values: np.ndarray
    """[n] float; NaN where the value was not finite."""


def line_chart(
    series: Sequence[Series],
    *,
    kind: Literal["line", "points", "stack"],
    scale: Literal["linear", "log"],
    smooth: bool,
    alt: str,
) -> str:
    """An SVG element with every series; the colour of the i-th is `--c{i % 8}`, from the ninth on dashed."""
    figure, axes = _new_figure()
    if kind == "stack":
        _stack(axes, series)
    else:
        for index, one in enumerate(series):
            style: dict[str, Any] = {
                "color": _SERIES[index % NUM_COLOURS],
                "linestyle": "-" if index < NUM_COLOURS else "--",
            }
            _line(axes, one, style, marked=kind == "points", smooth=smooth and scale == "linear")
    if scale == "log" and any((one.values > 0).any() for one in series):
        axes.set_yscale("log", nonpositive="mask")
    elif kind != "stack":
        _widen(axes, series)
    _steps_axis(axes, series)
    return _svg(figure, alt)


def heat_map(
    matrix: np.ndarray,
    *,
    x_label: str,
    y_label: str,
    x_start: int = 0,
    alt: str,
    even: float | None = None,
    top: float = 0.0,
) -> str:
    """An SVG element of `matrix` [rows, columns] (NaN is left blank).

    Args:
        matrix: values; row 0 is on top.
        x_label: what columns are.
        y_label: what rows are.
        x_start: number of the first column.
        alt: text for those who do not see it.
        even: value that is drawn white, with blue below and red above; None for one colour from 0 up.
        top: least value of the scale's upper end, so that two maps can share it.
    """
    from matplotlib.colors import Normalize, TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    rows, columns = matrix.shape
    figure, axes = _new_figure(with_bar=True)
    largest = float(np.nanmax(matrix)) if np.isfinite(matrix).any() else 1.0
    largest = max(largest, top)
    if even is None:
        norm, colours = Normalize(0.0, largest or 1.0), "viridis"
    else:
        norm, colours = TwoSlopeNorm(even, 0.0, max(2 * even, largest)), "RdBu_r"
    extent = (x_start - 0.5, x_start + columns - 0.5, rows - 0.5, -0.5)
    image = axes.imshow(matrix, aspect="auto", interpolation="none", cmap=colours, norm=norm, extent=extent)
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    bar = figure.colorbar(image, cax=figure.add_axes(_BAR))
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]  a Spine; typed as something callable
    return _svg(figure, alt)


def running_mean(values: np.ndarray) -> np.ndarray | None:
    """[n] -> [n] mean over a centred window of a twelfth of the values, NaN left out; None for too few of them."""
    if len(values) < MIN_POINTS_TO_SMOOTH:
        return None
    half = max(1, len(values) // 24)
    kernel = np.ones(2 * half + 1)
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    count = np.convolve(known.astype(float), kernel, mode="same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def _new_figure(*, with_bar: bool = False) -> tuple[Figure, Axes]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES)
        return figure, figure.add_axes(_WITH_BAR if with_bar else _PLAIN)


def _line(axes: Axes, one: Series, style: Mapping[str, Any], *, marked: bool, smooth: bool) -> None:
    if marked or len(one.steps) == 1:
        known = np.isfinite(one.values)
        axes.plot(one.steps[known], one.values[known], marker="o", markersize=3.5, linewidth=1.6, **style)
        return
    mean = running_mean(one.values) if smooth else None
    if mean is None:
        axes.plot(one.steps, one.values, linewidth=1.6, **style)
        return
    axes.plot(one.steps, one.values, linewidth=0.9, alpha=0.35, **style)
    axes.plot(one.steps, mean, linewidth=1.9, **style)


def _stack(axes: Axes, series: Sequence[Series]) -> None:
    """Parts of a whole; a step that lacks a part (an evaluation) has 0 of it."""
    steps = np.unique(np.concatenate([one.steps for one in series]))
    heights = np.zeros((len(series), len(steps)))
    for row, one in enumerate(series):
        heights[row, np.searchsorted(steps, one.steps)] = np.nan_to_num(one.values)
    below = np.zeros(len(steps))
    for index, height in enumerate(heights):
        axes.fill_between(steps, below, below + height, step="mid", color=_SERIES[index % NUM_COLOURS], linewidth=0)
        below = below + height


def _widen(axes: Axes, series: Sequence[Series]) -> None:
    """A scale that does not blow up rounding: values that are all but equal are drawn as a level line."""
    values = np.concatenate([one.values[np.isfinite(one.values)] for one in series])
    low, high = float(values.min()), float(values.max())
    size = max(abs(low), abs(high))
    if size == 0:
        axes.set_ylim(-0.05, 1.0)
    elif high - low < 1e-4 * size:
        axes.set_ylim(low - 0.1 * size, high + 0.1 * size)


def _steps_axis(axes: Axes, series: Sequence[Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    first = min(int(one.steps[0]) for one in series)
    last = max(int(one.steps[-1]) for one in series)
    margin = max(0.5, 0.015 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_xlabel("step")


def _svg(figure: Figure, alt: str) -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _adopt(out.getvalue(), alt)


def _adopt(document: str, alt: str) -> str:
    """A matplotlib SVG document -> an element of the page: CSS colours, the page's font, an accessible name."""
    text = document[document.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<svg\s[^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" role="img" VOICE>', text, count=1)
    text = text.replace("VOICE>", f'aria-label="{html.escape(alt)}"><title>{html.escape(alt)}</title>', 1)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", text)
    text = re.sub(r"\n\s*", "\n", text)
    for colour, variable in ((_INK, "--ink"), (_GRID, "--grid")):
        text = text.replace(colour, f"var({variable})")
    for index, colour in enumerate(_SERIES):
        text = text.replace(colour, f"var(--c{index})")
    return text


def with_own_ids(svg: str, prefix: str) -> str:
    """The same element with ids that no other element of the page has."""
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-")
    return re.sub(r'href="#', f'href="#{prefix}-', svg)
