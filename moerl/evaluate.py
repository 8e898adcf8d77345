"""Held-out evaluation: the same engine and the same rewards as training, greedy and sampled, pass@k, per named set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moerl.metrics import Mean, Metrics, Sum, merge_into
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

EVALUATION_STEP = 0
"""Evaluation always draws with the seeds of step 0, so that two evaluations differ by their weights alone."""

Collect = Callable[..., list[RolloutGroup]]


@dataclass(frozen=True)
class EvaluationSet:
    """A named set of held-out prompts."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class Evaluator:
    """Runs every set through the engine. An answer is right when its first reward is at least one half."""

    sets: Sequence[EvaluationSet]
    collect: Collect
    """`Collector.collect`."""
    greedy: SamplingParams
    sampled: SamplingParams
    num_samples: int
    pass_at: Sequence[int]

    def run(self) -> Metrics:
        """Metrics `eval/*` over all sets, and `eval/<set>/*` for each where there are several."""
        metrics: Metrics = {}
        for held_out in self.sets:
            new = self._one(held_out.prompts)
            merge_into(metrics, {f"eval/{name}": metric for name, metric in new.items()})
            if len(self.sets) > 1:
                merge_into(metrics, {f"eval/{held_out.name}/{name}": metric for name, metric in new.items()})
        return metrics

    def _one(self, prompts: Sequence[Prompt]) -> Metrics:
        greedy = self.collect(prompts, step=EVALUATION_STEP, group_size=1, params=self.greedy)
        metrics = _accuracy(greedy, "greedy")
        if self.num_samples:
            groups = self.collect(prompts, step=EVALUATION_STEP, group_size=self.num_samples, params=self.sampled)
            merge_into(metrics, _accuracy(groups, "sampled"))
            for k in self.pass_at:
                merge_into(metrics, {f"pass@{k}": _pass_at(groups, k)})
        return metrics


def is_right(trajectory: Trajectory) -> bool:
    """Whether the first reward of the trajectory is at least one half."""
    return next(iter(trajectory.reward_components.values()), 0.0) >= 0.5


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased chance that one of k answers is right, `num_right` of `num_samples` being so (arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _accuracy(groups: Sequence[RolloutGroup], name: str) -> Metrics:
    scored = [t for group in groups for t in group.trajectories if t.status == "ok"]
    failed = sum(len(group.trajectories) for group in groups) - len(scored)
    lengths = sum(t.response_length for t in scored)
    return {
        f"accuracy_{name}": Mean(float(sum(map(is_right, scored))), float(len(scored))),
        f"response_length_{name}": Mean(float(lengths), float(len(scored))),
        f"truncated_fraction_{name}": Mean(float(sum(t.finish_reason == "length" for t in scored)), float(len(scored))),
        f"errors_{name}": Sum(float(failed)),
    }


def _pass_at(groups: Sequence[RolloutGroup], k: int) -> Mean:
    total = count = 0.0
    for group in groups:
        scored = [t for t in group.trajectories if t.status == "ok"]
        if len(scored) >= k:
            total += pass_at_k(len(scored), sum(map(is_right, scored)), k)
            count += 1.0
    return Mean(total, count)
