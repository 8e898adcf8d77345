"""The pass-rate table of a run: how often each prompt was solved, whenever it was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BINS = 11
"""Pass rates in tenths, from 0 to 10."""
MAX_COLUMNS = 60
"""Steps are put together above it."""


@dataclass(frozen=True)
class PromptRates:
    """One prompt over the run."""

    prompt_id: str
    visits: int
    first_step: int
    first: float
    """Pass rate at the first visit."""
    last_step: int
    last: float
    answers: int
    passed: int

    @property
    def overall(self) -> float:
        """Share of all answers."""
        return self.passed / self.answers


def by_prompt(rows: Sequence[Mapping[str, Any]]) -> list[PromptRates]:
    """One entry for each prompt with a scored answer, in order of their first visit; `rows` in order of their step."""
    found: dict[str, PromptRates] = {}
    for row in rows:
        answers, passed, step = row["answers"], row["passed"], row["step"]
        if not answers:
            continue
        name, rate = row["prompt_id"], passed / answers
        before = found.get(name, PromptRates(name, 0, step, rate, step, rate, 0, 0))
        found[name] = PromptRates(
            name,
            before.visits + 1,
            before.first_step,
            before.first,
            step,
            rate,
            before.answers + answers,
            before.passed + passed,
        )
    return list(found.values())


def telling(prompts: Sequence[PromptRates], each: int) -> list[tuple[str, list[PromptRates]]]:
    """(heading, prompts) of those that a person should read: never solved, most gained, most lost; at most `each`."""
    moved = [one for one in prompts if one.visits > 1]
    groups = [
        ("never solved", sorted((one for one in prompts if not one.passed), key=lambda one: -one.answers)),
        ("most gained", sorted((one for one in moved if one.last > one.first), key=lambda one: one.first - one.last)),
        ("most lost", sorted((one for one in moved if one.last < one.first), key=lambda one: one.last - one.first)),
    ]
    return [(heading, chosen[:each]) for heading, chosen in groups if chosen]


def rate_map(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """([11, columns] share of a column's visits with each pass rate in tenths, [columns] first step of each column)."""
    scored = [(row["step"], row["passed"] / row["answers"]) for row in rows if row["answers"]]
    steps = np.array([step for step, _ in scored])
    tenths = np.rint(10 * np.array([rate for _, rate in scored])).astype(int)
    known = np.unique(steps)
    starts = np.array([part[0] for part in np.array_split(known, min(len(known), MAX_COLUMNS))])
    counts = np.zeros((BINS, len(starts)))
    np.add.at(counts, (tenths, np.searchsorted(starts, steps, side="right") - 1), 1.0)
    return counts / counts.sum(axis=0), starts
