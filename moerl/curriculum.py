"""How often the policy solved each prompt, and which are worth sampling by it; wraps a run's source and buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moerl.algorithms.pass_rate import PassRate, PassRates
from moerl.config.schema import RefilterSection
from moerl.errors import CheckpointError, DataError
from moerl.metrics import Last, Metrics, Sum, merge_into
from moerl.protocols import GroupFilter, PromptSource, Rollouts
from moerl.refilter import Refilter
from moerl.types import Prompt, RolloutGroup

MAX_ROUNDS = 4
"""How many times as many prompts as there are may be passed over in a row before the run stops."""


class Visit(NamedTuple):
    """A completed group, as the pass-rate table has it."""

    prompt_id: str
    answers: int
    """With a verdict."""
    passed: int


LogVisits = Callable[[int, Sequence[Visit]], None]
"""(step, its visits in the order of their groups)."""


class Curriculum:
    """The pass rates of a run's prompts. An answer passes where its task reward is above 0."""

    def __init__(
        self,
        keeps: Callable[[PassRate, int], bool],
        num_prompts: int,
        refilter: RefilterSection | None = None,
        log: LogVisits | None = None,
    ) -> None:
        """Wire it.

        Args:
            keeps: says of a prompt's history and the step whether to sample it.
            num_prompts: how many there are.
            refilter: when to leave prompts out until further notice; None never does.
            log: told every step's visits.
        """
        self.rates = PassRates()
        self.refilter = Refilter(refilter or RefilterSection())
        self.step = 0
        self.num_passed_over = 0
        self._keeps = keeps
        self._log = log
        self._visits: list[Visit] = []
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
        wanted = self.refilter.keeps(prompt.prompt_id) and self._keeps(self.rates.of(prompt.prompt_id), self.step)
        self.num_passed_over += not wanted
        return wanted

    def refuse_endless(self, passed_over: int) -> None:
        """Raise `DataError` where nothing is left to sample."""
        if passed_over > self._patience:
            raise DataError(
                f"step {self.step}: {passed_over} prompts in a row were passed over by algorithm.filters or "
                "data.refilter; the data are learned or out of the band: stop here, add prompts, or widen "
                "pass_rate_band, no_positive_resampling or data.refilter"
            )

    def begin(self, step: int) -> Metrics:
        """Before `step` samples."""
        self.step = step
        self._visits = []
        return self.refilter.at(step, self.rates)

    def end(self) -> Metrics:
        """After it did: the visits go to the log; `data/*` speak of every prompt sampled so far, at its last visit."""
        if self._log is not None:
            self._log(self.step, self._visits)
        recent = [rate.recent for rate in self.rates.prompts.values()]
        metrics: Metrics = {"data/prompts_seen": Last(float(len(recent)))}
        if recent:
            metrics["data/never_passed_fraction"] = Last(sum(rate == 0 for rate in recent) / len(recent))
            metrics["data/always_passed_fraction"] = Last(sum(rate == 1 for rate in recent) / len(recent))
        return metrics

    def _observe(self, group: RolloutGroup) -> None:
        rewards = np.array([t.reward for t in group.trajectories if t.status == "ok"])
        rewards = rewards[np.isfinite(rewards)]
        visit = Visit(group.prompt.prompt_id, len(rewards), int((rewards > 0).sum()))
        self._visits.append(visit)
        self.rates.visit(visit.prompt_id, visit.answers, visit.passed, self.step)


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
        before = self._curriculum.num_passed_over
        own = self._curriculum.begin(step)
        groups, metrics = self._inner.take(step, version)
        merge_into(own, self._curriculum.end())
        own["rollout/prompts_passed_over"] = Sum(float(self._curriculum.num_passed_over - before))
        return groups, merge_into(metrics, own)

    def state_dict(self) -> dict[str, Any]:
        """The inner buffer's, the pass rates, and what is left out."""
        own = {"pass_rates": self._curriculum.rates.state_dict(), "refilter": self._curriculum.refilter.state_dict()}
        return {**self._inner.state_dict(), **own, "curriculum_step": self._curriculum.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them.

        Raises:
            CheckpointError: something is missing or damaged.
        """
        missing = [key for key in ("pass_rates", "refilter") if key not in state]
        if missing:
            raise CheckpointError(
                f"rollout state lacks {', '.join(missing)}; use a checkpoint of this version of moerl"
            )
        self._inner.load_state_dict(state)
        self._curriculum.rates.load_state_dict(state["pass_rates"])
        self._curriculum.refilter.load_state_dict(state["refilter"])
        self._curriculum.step = int(state.get("curriculum_step", 0))  # what is due, for prompts that are drawn ahead
