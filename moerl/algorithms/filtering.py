"""All filters of a run as one object: prompts before they are sampled, groups as they complete, then samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moerl.algorithms.pass_rate import PassRate
from moerl.algorithms.registries import filters
from moerl.errors import ConfigError
from moerl.types import RolloutGroup, Trajectory

Choice = Callable[[RolloutGroup], np.ndarray]
"""A completed group -> [g] bool."""


@dataclass(frozen=True)
class Filters:
    """Filters of all kinds, each in the order of the configuration."""

    groups: tuple[Callable[[RolloutGroup], str | None], ...] = ()
    samples: tuple[Callable[[Trajectory], bool], ...] = ()
    exclusions: tuple[Callable[[Trajectory], bool], ...] = ()
    """The sample filters whose rejects are out of their group's statistics too."""
    choices: tuple[Choice, ...] = ()
    """Filters that choose among the answers of a group."""
    choice_exclusions: tuple[Choice, ...] = ()
    prompts: tuple[Callable[[PassRate, int], bool], ...] = ()
    """(history of a prompt, step) -> whether to sample it."""
    resampling: tuple[Choice, ...] = ()
    """Which answers to sample anew before anything else looks at the group."""
    resampling_rounds: int = 0
    """How often at most."""

    def group(self, group: RolloutGroup) -> str | None:
        """None to accept a completed group, or why not; trajectories out of the statistics are not seen."""
        in_statistics = _all_of(self.choice_exclusions, group)
        counted = tuple(
            trajectory
            for trajectory, counts in zip(group.trajectories, in_statistics, strict=True)
            if counts and self.counts(trajectory)
        )
        seen = dataclasses.replace(group, trajectories=counted)
        return next((reason for reason in (look(seen) for look in self.groups) if reason is not None), None)

    def sample(self, trajectory: Trajectory) -> bool:
        """False: mask all tokens of this trajectory."""
        return all(keep(trajectory) for keep in self.samples)

    def counts(self, trajectory: Trajectory) -> bool:
        """False: the reward must not enter the group's statistics either; give it to the credit rule as NaN."""
        return all(keep(trajectory) for keep in self.exclusions)

    def members(self, group: RolloutGroup) -> tuple[np.ndarray, np.ndarray]:
        """(kept, counted) [g] bool each, of the filters that look at the whole group."""
        return _all_of(self.choices, group), _all_of(self.choice_exclusions, group)

    def prompt(self, rate: PassRate, step: int) -> bool:
        """False: do not sample this prompt now."""
        return all(keep(rate, step) for keep in self.prompts)

    def anew(self, group: RolloutGroup) -> np.ndarray:
        """[g] bool: the answers to sample anew."""
        chosen = np.zeros(len(group.trajectories), dtype=bool)
        for choose in self.resampling:
            chosen |= choose(group)
        return chosen


def _all_of(choices: Sequence[Choice], group: RolloutGroup) -> np.ndarray:
    kept = np.ones(len(group.trajectories), dtype=bool)
    for choose in choices:
        kept &= choose(group)
    return kept


def build_filters(nodes: Sequence[Mapping[str, Any]]) -> Filters:
    """Filters from their configuration nodes.

    Raises:
        ConfigError: an unknown filter or argument, or the same filter twice.
    """
    kinds: dict[str, list[Any]] = {name: [] for name in ("group", "sample", "members", "prompt", "rollout")}
    excluding: dict[str, list[Any]] = {"sample": [], "members": []}
    names: set[str] = set()
    rounds = 0
    for index, node in enumerate(nodes):
        plugin, cfg = filters.resolve(node, where=f"algorithm.filters[{index}]")
        if plugin.name in names:
            raise ConfigError(f"algorithm.filters[{index}] is a second {plugin.name!r}; keep one of them")
        names.add(plugin.name)
        acts_on = plugin.traits["acts_on"]
        kind = str(acts_on(cfg) if callable(acts_on) else acts_on)
        bound = partial(plugin.target, cfg=cfg)
        kinds[kind].append(bound)
        arguments = vars(cfg)
        if kind in excluding and arguments.get("exclude_from_stats", False):
            excluding[kind].append(bound)
        if kind == "rollout":
            rounds = max(rounds, arguments["rounds"])
    return Filters(
        groups=tuple(kinds["group"]),
        samples=tuple(kinds["sample"]),
        exclusions=tuple(excluding["sample"]),
        choices=tuple(kinds["members"]),
        choice_exclusions=tuple(excluding["members"]),
        prompts=tuple(kinds["prompt"]),
        resampling=tuple(kinds["rollout"]),
        resampling_rounds=rounds,
    )
