"""A collector whose groups have some answers sampled anew before anything else looks at them, such as copies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from moerl.metrics import Metrics, Sum
from moerl.rollout.collect import Collector, group_starts
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

FIRST_INDEX = 1_000_000
"""Sample indices of answers that are drawn anew start here, far above those of any group of a step."""


class ResamplingCollector:
    """`Collector.collect` with replacements."""

    def __init__(self, inner: Collector, choose: Callable[[RolloutGroup], np.ndarray], rounds: int) -> None:
        """`choose` says which answers of a group [g] bool to sample anew; asked again after each of the rounds."""
        self._inner = inner
        self._choose = choose
        self._rounds = rounds
        self._drawn = 0

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        group_size: int,
        params: SamplingParams,
        first_indices: Sequence[int] | None = None,
    ) -> list[RolloutGroup]:
        """As `Collector.collect`; what is chosen after the last round stays."""
        starts = group_starts(Counter(), prompts, group_size) if first_indices is None else first_indices
        groups = self._inner.collect(
            prompts, step=step, group_size=group_size, params=params, first_indices=list(starts)
        )
        unused = [FIRST_INDEX + start * self._rounds for start in starts]
        drawn = 0
        for _ in range(self._rounds):
            places = [(g, int(i)) for g, group in enumerate(groups) for i in np.flatnonzero(self._choose(group))]
            if not places:
                break
            indices = []
            for g, _place in places:
                indices.append(unused[g])
                unused[g] += 1
            answers = self._inner.collect(
                [groups[g].prompt for g, _place in places],
                step=step,
                group_size=1,
                params=params,
                first_indices=indices,
            )
            drawn += len(answers)
            for (g, place), answer in zip(places, answers, strict=True):
                groups[g] = _with(groups[g], place, answer.trajectories[0])
        self._drawn += drawn
        if drawn:
            logger.info("step %d: %d answers were sampled anew", step, drawn)
        return groups

    def take(self) -> Metrics:
        """`rollout/resampled`: answers that were drawn anew since the last call, those of several rounds each time."""
        drawn, self._drawn = self._drawn, 0
        return {"rollout/resampled": Sum(float(drawn))}


def _with(group: RolloutGroup, place: int, trajectory: Trajectory) -> RolloutGroup:
    trajectories = list(group.trajectories)
    trajectories[place] = trajectory
    return replace(group, trajectories=tuple(trajectories))
