"""The buffer between rollout and learning: a step's worth of accepted groups, refilled within a bound."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from moerl.errors import CheckpointError, ConfigError, RolloutError
from moerl.metrics import Metrics, Sum, merge_into
from moerl.protocols import GroupFilter, PromptSource
from moerl.rollout.collect import GroupCollector, group_starts
from moerl.rollout.rollout_metrics import error_kind, rollout_metrics
from moerl.types import RolloutGroup, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

COUNTERS = ("prompts_used", "groups_dropped", "errors")


class RolloutBuffer:
    """Keeps `Rollouts`, strictly on-policy: what `take(step)` returns was sampled within that call."""

    def __init__(
        self,
        *,
        source: PromptSource,
        collector: GroupCollector,
        params: SamplingParams,
        prompts_per_step: int,
        group_size: int,
        group_filter: GroupFilter | None = None,
        refill_rounds: int = 0,
        max_error_fraction: float = 0.1,
    ) -> None:
        """Wire it.

        Args:
            source: prompts in a seeded order.
            collector: plays and scores them.
            params: of every completion; its seed is not used.
            prompts_per_step: groups that `take` is to return.
            group_size: episodes per prompt.
            group_filter: returns why a group is dropped, or None to accept it.
            refill_rounds: how often the groups that are missing are asked for anew.
            max_error_fraction: share of a step's trajectories with status `error` or `aborted` above which it raises.

        Raises:
            ConfigError: a size below 1, or a fraction outside 0..1.
        """
        if min(prompts_per_step, group_size) < 1 or refill_rounds < 0:
            raise ConfigError(
                f"rollout.prompts_per_step={prompts_per_step} and rollout.group_size={group_size} must be 1 or more, "
                f"algorithm.refill_rounds={refill_rounds} 0 or more"
            )
        if not 0 <= max_error_fraction <= 1:
            raise ConfigError(f"reward.max_error_fraction={max_error_fraction} must be between 0 and 1")
        self._source = source
        self._collector = collector
        self._params = params
        self._prompts_per_step = prompts_per_step
        self._group_size = group_size
        self._filter = group_filter
        self._refill_rounds = refill_rounds
        self._max_error_fraction = max_error_fraction
        self._totals: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def take(self, step: int, version: int) -> tuple[list[RolloutGroup], Metrics]:
        """Sample until `prompts_per_step` groups are accepted or the refill rounds are used up.

        Only the missing number is asked for, so no accepted group is left over. Fewer groups than asked for may return,
        none at all in the extreme; the caller trains on what is there. Reward and length metrics are over every sampled
        group, dropped ones included, so that a filter cannot make them look better.

        Args:
            step: part of every sample's seed.
            version: of the policy that is about to train; older tokens are refused.

        Raises:
            RolloutError: too many failed episodes, or tokens of an older version (weights were not published).
        """
        accepted: list[RolloutGroup] = []
        sampled: list[RolloutGroup] = []
        dropped: Counter[str] = Counter()
        seen: Counter[str] = Counter()
        rounds = 0
        while True:
            groups = self._sample(step, version, self._prompts_per_step - len(accepted), seen)
            sampled += groups
            for group in groups:
                reason = why_dropped(group, self._filter)
                if reason is None:
                    accepted.append(group)
                else:
                    dropped[reason] += 1
            refuse_failures(sampled, step, self._max_error_fraction)
            if len(accepted) == self._prompts_per_step or rounds == self._refill_rounds:
                break
            rounds += 1
        self._count(sampled, dropped)
        if len(accepted) < self._prompts_per_step:
            logger.info("step %d: %d of %d groups after filters", step, len(accepted), self._prompts_per_step)
        counts: Metrics = {f"rollout/filter/{reason}": Sum(number) for reason, number in dropped.items()}
        counts["rollout/groups"] = Sum(len(accepted))
        counts["rollout/groups_dropped"] = Sum(dropped.total())
        counts["rollout/refill_rounds"] = Sum(rounds)
        counts["rollout/prompts_used"] = Sum(len(sampled))
        return accepted, merge_into(counts, rollout_metrics(sampled, version))

    def state_dict(self) -> dict[str, Any]:
        """Data cursor and counters, as plain JSON values."""
        return {"source": self._source.state_dict(), **self._totals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them.

        Raises:
            CheckpointError: a field is missing.
        """
        missing = [key for key in ("source", *COUNTERS) if key not in state]
        if missing:
            raise CheckpointError(
                f"rollout state lacks {', '.join(missing)}; use a checkpoint of this version of moerl"
            )
        self._source.load_state_dict(state["source"])
        self._totals = {key: int(state[key]) for key in COUNTERS}

    def _sample(self, step: int, version: int, count: int, seen: Counter[str]) -> list[RolloutGroup]:
        prompts = self._source.next_prompts(count)
        groups = self._collector.collect(
            prompts,
            step=step,
            group_size=self._group_size,
            params=self._params,
            first_indices=group_starts(seen, prompts, self._group_size),
        )
        for group in groups:
            for trajectory in group.trajectories:
                _refuse_stale(trajectory, group.prompt.prompt_id, version)
        return groups

    def _count(self, sampled: list[RolloutGroup], dropped: Counter[str]) -> None:
        self._totals["prompts_used"] += len(sampled)
        self._totals["groups_dropped"] += dropped.total()
        self._totals["errors"] += sum(t.status == "error" for group in sampled for t in group.trajectories)


def why_dropped(group: RolloutGroup, group_filter: GroupFilter | None) -> str | None:
    """None to accept a completed group; one in which no episode went well is not shown to the filter."""
    if all(t.status != "ok" for t in group.trajectories):
        return "all_failed"
    return None if group_filter is None else group_filter(group)


def refuse_failures(sampled: Sequence[RolloutGroup], step: int, max_error_fraction: float) -> None:
    """Raise `RolloutError` where more than that share of the groups' episodes failed, or were aborted by the engine.

    Answers that end with a group which is given up (`long_tail: drop`) are in no group, and count here for nothing.
    """
    trajectories = [t for group in sampled for t in group.trajectories]
    failed = [t for t in trajectories if t.status in ("error", "aborted")]
    if len(failed) <= max_error_fraction * len(trajectories):
        return
    counts = Counter("aborted" if t.status == "aborted" else error_kind(t.error) for t in failed)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    raise RolloutError(
        f"step {step}: {len(failed)} of {len(trajectories)} episodes failed, more than reward.max_error_fraction="
        f"{max_error_fraction:g} allows ({kinds}; first: {failed[0].error})"
    )


def _refuse_stale(trajectory: Trajectory, prompt_id: str, version: int) -> None:
    old = [sampled for _, _, sampled in trajectory.version_spans if sampled < version]
    if old:
        raise RolloutError(
            f"prompt {prompt_id}: got tokens of policy version {old[0]} for version {version}, and "
            "rollout.max_staleness is 0; publish the weights before the step"
        )
