"""What a step's sampled groups say about themselves: lengths, rewards, errors, staleness."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from moerl.metrics import Last, Max, Mean, Metrics, Sum, merge_into
from moerl.types import RolloutGroup, Trajectory


def rollout_metrics(groups: Sequence[RolloutGroup], version: int) -> Metrics:
    """Of all trajectories; lengths only of those that sampled something, rewards only of scored ones.

    `reward/std` is the population deviation over all scored trajectories (`Last`: one rank alone computes it).
    `rollout/staleness_mean` is `version` minus the version that sampled, a mean over tokens.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    metrics: Metrics = {
        "rollout/tokens": Sum(sum(t.response_length for t in trajectories)),
        "rollout/errors": Sum(sum(t.status == "error" for t in trajectories)),
        "rollout/aborted": Sum(sum(t.status == "aborted" for t in trajectories)),
        "rollout/too_long": Sum(sum(t.status == "too_long" for t in trajectories)),
    }
    for trajectory in trajectories:
        merge_into(metrics, _of_one(trajectory, version))
    rewards = [t.reward for t in trajectories if t.is_scored]
    if rewards:
        metrics["reward/std"] = Last(statistics.pstdev(rewards))
    return metrics


def staleness_metrics(groups: Sequence[RolloutGroup], version: int) -> Metrics:
    """How many versions older than `version` the sampled tokens of `groups` are; every token counts for itself.

    `rollout/staleness_mean`, `rollout/staleness_max`, `rollout/staleness_fraction` (of tokens that are older at all),
    `rollout/staleness_mixed_fraction` (of the answers with tokens, those of several versions).
    """
    metrics: Metrics = {}
    for trajectory in (t for group in groups for t in group.trajectories if t.version_spans):
        lags = [(end - start, version - sampled) for start, end, sampled in trajectory.version_spans]
        length = sum(count for count, _ in lags)
        one: Metrics = {
            "rollout/staleness_mean": Mean(sum(count * lag for count, lag in lags), length),
            "rollout/staleness_max": Max(max(lag for _, lag in lags)),
            "rollout/staleness_fraction": Mean(sum(count for count, lag in lags if lag > 0), length),
            "rollout/staleness_mixed_fraction": Mean(float(len({lag for _, lag in lags}) > 1)),
        }
        merge_into(metrics, one)
    return metrics


def is_right(trajectory: Trajectory) -> bool:
    """Whether the first reward of the trajectory is at least one half."""
    return next(iter(trajectory.reward_components.values()), 0.0) >= 0.5


def error_kind(error: str) -> str:
    """A metric-safe name of what comes before the first colon: `TimeoutError: no end within ...` -> `TimeoutError`."""
    return re.sub(r"\W+", "_", error.partition(":")[0].strip())[:48].strip("_") or "unknown"


def _of_one(trajectory: Trajectory, version: int) -> Metrics:
    metrics: Metrics = {f"rollout/{name}": Mean(value) for name, value in trajectory.metrics.items()}
    if trajectory.status == "error":
        metrics[f"rollout/errors/{error_kind(trajectory.error)}"] = Sum(1)
    length = trajectory.response_length
    if length:
        metrics["rollout/response_length"] = Mean(length)
        metrics["rollout/response_length_max"] = Max(length)
        metrics["rollout/truncated_fraction"] = Mean(float(trajectory.finish_reason == "length"))
        stale = sum((end - start) * (version - sampled) for start, end, sampled in trajectory.version_spans)
        metrics["rollout/staleness_mean"] = Mean(stale, length)
    if trajectory.is_scored:
        metrics["reward/mean"] = Mean(trajectory.reward)
        metrics |= {f"reward/{name}": Mean(value) for name, value in trajectory.reward_components.items()}
    return metrics
