"""All shaping terms of a run as one function of the step's groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moerl.algorithms.registries import shapings
from moerl.errors import ConfigError
from moerl.metrics import Mean, Metrics
from moerl.types import RolloutGroup

Shaping = Callable[[Sequence[RolloutGroup]], tuple[np.ndarray, Metrics]]
"""All groups of a step -> what is added to every reward [n] float64, group after group, and `reward/shaping_<name>`,
the mean over answers that have a verdict."""


def build_shaping(nodes: Sequence[Mapping[str, Any]]) -> Shaping:
    """The sum of the shaping terms that `nodes` configure; zeros if there are none.

    Raises:
        ConfigError: an unknown term or argument, or the same term twice.
    """
    terms = [shapings.resolve(node, where=f"algorithm.shaping[{index}]") for index, node in enumerate(nodes)]
    names = [plugin.name for plugin, _ in terms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"algorithm.shaping has {names.count(name)} terms {name!r}; keep one of them")

    def shape(groups: Sequence[RolloutGroup]) -> tuple[np.ndarray, Metrics]:
        total = np.zeros(sum(len(group.trajectories) for group in groups))
        is_sample = np.array([answer.is_scored for group in groups for answer in group.trajectories], dtype=bool)
        metrics: Metrics = {}
        for plugin, cfg in terms:
            parts = [np.asarray(plugin.target(group, cfg), dtype=np.float64) for group in groups]
            term = np.concatenate(parts) if parts else np.zeros(0)
            total = total + term
            metrics[f"reward/shaping_{plugin.name}"] = Mean(float(term[is_sample].sum()), float(is_sample.sum()))
        return total, metrics

    return shape
