"""Which prompts are worth sampling, by how often the policy solved them; wraps the source and the buffer of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moerl.algorithms.pass_rate import PassRate, PassRates
from moerl.errors import CheckpointError, DataError
from moerl.metrics import Metrics, Sum, merge_into
from moerl.protocols import GroupFilter, PromptSource, Rollouts
from moerl.types import Prompt, RolloutGroup

MAX_ROUNDS = 4
"""How many times as many prompts as there are may be passed over in a row before the run stops."""


class Curriculum:
    """The pass rates of a run's prompts. An answer passes where its task reward is above 0."""

    def __init__(self, keeps: Callable[[PassRate, int], bool], num_prompts: int) -> None:
        """`keeps` says of a prompt's history and the step whether to sample it."""
        self.rates = PassRates()
        self.step = 0
        self.num_passed_over = 0
        self._keeps = keeps
        self._patience = MAX_ROUNDS * num_prompts

    def source(self, inner: PromptSource) -> PromptSource:
        """`inner` without the prompts that are not to be sampled now."""
        return _CuratedSource(self, inner)

    def group_filter(self, inner: GroupFilter) -> GroupFilter:
        """`inner`, which sees every completed group; its pass rate is taken down first."""

        def look(group: RolloutGroup) -> str | None:
            self._observe(group)
            return inner(group)

        return look

    def rollouts(self, inner: Rollouts) -> Rollouts:
        """`inner`, which then knows the step, counts what was passed over and keeps the pass rates in its state."""
        return _CuratedRollouts(self, inner)

    def wants(self, prompt: Prompt) -> bool:
        """Whether to sample it now; counts those that are passed over."""
        wanted = self._keeps(self.rates.of(prompt.prompt_id), self.step)
        self.num_passed_over += not wanted
        return wanted

    def refuse_endless(self, passed_over: int) -> None:
        """Raise `DataError` where nothing is left to sample."""
        if passed_over > self._patience:
            raise DataError(
                f"step {self.step}: {passed_over} prompts in a row were passed over by algorithm.filters; the data are "
                "learned or out of the band: stop here, add prompts, or widen pass_rate_band or no_positive_resampling"
            )

    def _observe(self, group: RolloutGroup) -> None:
        rewards = np.array([t.reward for t in group.trajectories if t.status == "ok"])
        rewards = rewards[np.isfinite(rewards)]
        self.rates.visit(group.prompt.prompt_id, len(rewards), int((rewards > 0).sum()), self.step)


class _CuratedSource:
    def __init__(self, curriculum: Curriculum, inner: PromptSource) -> None:
        self._curriculum = curriculum
        self._inner = inner

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts that are to be sampled now."""
        chosen: list[Prompt] = []
        passed_over = 0
        while len(chosen) < count:
            drawn = self._inner.next_prompts(1)
            wanted = [prompt for prompt in drawn if self._curriculum.wants(prompt)]
            passed_over = 0 if wanted else passed_over + 1
            self._curriculum.refuse_endless(passed_over)
            chosen += wanted
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """The inner source's cursor."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._inner.load_state_dict(state)


class _CuratedRollouts:
    def __init__(self, curriculum: Curriculum, inner: Rollouts) -> None:
        self._curriculum = curriculum
        self._inner = inner

    def take(self, step: int, version: int) -> tuple[list[RolloutGroup], Metrics]:
        """As the inner buffer."""
        self._curriculum.step = step
        before = self._curriculum.num_passed_over
        groups, metrics = self._inner.take(step, version)
        passed_over = self._curriculum.num_passed_over - before
        return groups, merge_into(metrics, {"rollout/prompts_passed_over": Sum(float(passed_over))})

    def state_dict(self) -> dict[str, Any]:
        """The inner buffer's, and the pass rates."""
        return {**self._inner.state_dict(), "pass_rates": self._curriculum.rates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both.

        Raises:
            CheckpointError: the pass rates are missing or damaged.
        """
        if "pass_rates" not in state:
            raise CheckpointError("rollout state lacks pass_rates; use a checkpoint of a run with the same filters")
        self._inner.load_state_dict(state)
        self._curriculum.rates.load_state_dict(state["pass_rates"])
