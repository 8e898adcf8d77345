"""Rollouts that say more in their metrics: what every completed group of a step is like, the dropped ones included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moerl.metrics import Metrics, merge_into
from moerl.protocols import GroupFilter, Rollouts
from moerl.types import RolloutGroup


class GroupDescriber:
    """Looks at groups as they complete, through the filter of a buffer, and adds to the metrics of its steps."""

    def __init__(self, describe: Callable[[Sequence[RolloutGroup]], Metrics]) -> None:
        """`describe` makes the metrics of a step's groups."""
        self._describe = describe
        self._seen: list[RolloutGroup] = []

    def group_filter(self, inner: GroupFilter) -> GroupFilter:
        """`inner`, whose groups are remembered until the step's end."""

        def look(group: RolloutGroup) -> str | None:
            self._seen.append(group)
            return inner(group)

        return look

    def rollouts(self, inner: Rollouts) -> Rollouts:
        """`inner`, whose metrics are added to."""
        return DescribedRollouts(inner, self.take)

    def take(self) -> Metrics:
        """Metrics of the groups since the last call."""
        seen, self._seen = self._seen, []
        return self._describe(seen)


class DescribedRollouts:
    """`inner`, with `more` in the metrics of every step."""

    def __init__(self, inner: Rollouts, more: Callable[[], Metrics]) -> None:
        """`more` is asked once a step, when its groups are there."""
        self._inner = inner
        self._more = more

    def take(self, step: int, version: int) -> tuple[list[RolloutGroup], Metrics]:
        """As the inner one."""
        groups, metrics = self._inner.take(step, version)
        return groups, merge_into(metrics, self._more())

    def state_dict(self) -> dict[str, Any]:
        """The inner one's."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._inner.load_state_dict(state)
