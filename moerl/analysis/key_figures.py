"""The few numbers that say how a run went, from its metric records; the summary and the report show the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""One record of metrics.jsonl: `step` and metrics by name, None where a value was not finite."""

LEARN_PHASES = ("score", "update")
"""Phases whose seconds `perf/learn_tokens_per_second` speaks of."""


def key_figures(metrics_rows: Iterable[Row]) -> dict[str, Any]:
    """Key figures of a run, from records in any order; a quantity that no record has is None.

    Step 0 is the evaluation before the first update; row `step: i` is after the i-th update.
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
        "reward_by_quarter": _by_quarter(trained, "reward/mean"),
        "rollout_tokens_per_second": _rate(trained, "rollout", ("rollout",)),
        "learn_tokens_per_second": _rate(trained, "learn", LEARN_PHASES),
        "learn_tflops": _mean(_values(trained, "perf/tflops")),
        "route_drift_per_update": _mean(
            _values(trained, "route_update/expert_change") or _values(trained, "route_probe/expert_change")
        ),
    }


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
