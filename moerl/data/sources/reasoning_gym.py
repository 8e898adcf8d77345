"""Prompts from the generators of the PyPI package `reasoning-gym`; its own `score_answer` judges them (`rewards`)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from moerl.data.rows import Row
from moerl.data.sources import prompt_sources
from moerl.errors import ConfigError, DataError


@dataclass
class ReasoningGymConfig:
    """Which generator."""

    task: str = MISSING
    """Name such as `chain_sum`."""
    size: int = 500
    """Number of tasks."""
    seed: int = 0
    """Task i is drawn from `seed + i`: seeds of two sets must be further apart than their sizes."""
    config: dict[str, Any] = field(default_factory=dict)
    """The generator's own settings, such as `{max_terms: 4}`."""


@prompt_sources.register("reasoning_gym", ReasoningGymConfig)
def generate_tasks(config: ReasoningGymConfig) -> list[Row]:
    """`size` tasks of one generator; the same for the same seed.

    `metadata["entry"]` is the generator's own entry; `metadata["task"]` and `metadata["config"]` rebuild its scorer.

    Raises:
        ConfigError: the package is missing, the task is unknown (with the nearest names), or its settings are wrong.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"prompt source reasoning_gym needs the package: pip install reasoning-gym ({error})"
        ) from error
    if config.task not in DATASETS:
        near = difflib.get_close_matches(config.task, DATASETS, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"reasoning_gym has no task {config.task!r}{hint} It has {len(DATASETS)} tasks")
    if config.size < 1:
        raise ConfigError(f"reasoning_gym {config.task}: size must be at least 1, is {config.size}")
    try:
        dataset = reasoning_gym.create_dataset(config.task, size=config.size, seed=config.seed, **config.config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning_gym {config.task}: config {config.config} is refused ({error})") from error
    rows = []
    for index in range(config.size):
        entry = dataset[index]
        where = f"reasoning_gym:{config.task}#{index}"
        if not str(entry["question"]).strip():
            raise DataError(f"{where}: the generator made an empty question; try another seed than {config.seed}")
        metadata = {"task": config.task, "config": dict(config.config), "entry": entry}
        answer = None if entry["answer"] is None else str(entry["answer"])
        rows.append(Row(index, entry["question"], answer, where, metadata=metadata))
    return rows
