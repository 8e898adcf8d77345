"""All filters of a run as one object: groups as they complete, then samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moerl.algorithms.registries import filters
from moerl.errors import ConfigError
from moerl.types import RolloutGroup, Trajectory


@dataclass(frozen=True)
class Filters:
    """Filters of both kinds, in the order of the configuration."""

    groups: tuple[Callable[[RolloutGroup], str | None], ...]
    samples: tuple[Callable[[Trajectory], bool], ...]
    exclusions: tuple[Callable[[Trajectory], bool], ...]
    """The sample filters whose rejects are out of their group's statistics too."""

    def group(self, group: RolloutGroup) -> str | None:
        """None to accept a completed group, or why not; trajectories out of the statistics are not seen."""
        counted = tuple(trajectory for trajectory in group.trajectories if self.counts(trajectory))
        seen = dataclasses.replace(group, trajectories=counted)
        return next((reason for reason in (look(seen) for look in self.groups) if reason is not None), None)

    def sample(self, trajectory: Trajectory) -> bool:
        """False: mask all tokens of this trajectory."""
        return all(keep(trajectory) for keep in self.samples)

    def counts(self, trajectory: Trajectory) -> bool:
        """False: the reward must not enter the group's statistics either; give it to the credit rule as NaN."""
        return all(keep(trajectory) for keep in self.exclusions)


def build_filters(nodes: Sequence[Mapping[str, Any]]) -> Filters:
    """Filters from their configuration nodes.

    Raises:
        ConfigError: an unknown filter or argument, or the same filter twice.
    """
    groups, samples, exclusions = [], [], []
    names: set[str] = set()
    for index, node in enumerate(nodes):
        plugin, cfg = filters.resolve(node, where=f"algorithm.filters[{index}]")
        if plugin.name in names:
            raise ConfigError(f"algorithm.filters[{index}] is a second {plugin.name!r}; keep one of them")
        names.add(plugin.name)
        bound = partial(plugin.target, cfg=cfg)
        if plugin.traits["acts_on"] == "group":
            groups.append(bound)
            continue
        samples.append(bound)
        if vars(cfg).get("exclude_from_stats", False):
            exclusions.append(bound)
    return Filters(tuple(groups), tuple(samples), tuple(exclusions))
