"""Groups to samples: rewards become advantages, filters empty masks. Every credit decision of a step is made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.types import CreditInputs
from moerl.metrics import Metrics, Sum, merge_into
from moerl.types import RolloutGroup, Sample, Trajectory


@dataclass(frozen=True)
class CreditRules:
    """The configured rules, as functions; `build.py` fills it from the algorithm section."""

    advantages: Callable[[CreditInputs], tuple[Tensor, Metrics]]
    """All rows of the step -> [n] float64."""
    shaping: Callable[[Sequence[RolloutGroup]], tuple[np.ndarray, Metrics]]
    """All groups -> [n] float64, added to the task reward."""
    keeps: Callable[[Trajectory], bool]
    """False empties the trajectory's mask."""
    counts: Callable[[Trajectory], bool]
    """False takes the trajectory out of its group's statistics too."""
    reward_weights: dict[str, float]
    """Weight by reward name."""


@dataclass(frozen=True)
class Row:
    """One trajectory with its place in the step."""

    group_id: int
    prompt_id: str
    trajectory: Trajectory


def credit(groups: Sequence[RolloutGroup], rules: CreditRules) -> tuple[list[Sample], Metrics]:
    """Samples of all scored trajectories, in group order, and the metrics of the decision.

    A trajectory that failed or could not be scored is no sample: it neither trains nor counts in a denominator. Its
    group's statistics are those of the others.
    """
    shaping, metrics = rules.shaping(groups)
    rows = [Row(g, group.prompt.prompt_id, t) for g, group in enumerate(groups) for t in group.trajectories]
    scored = [i for i, row in enumerate(rows) if row.trajectory.status == "ok" and np.isfinite(row.trajectory.reward)]
    if not scored:
        return [], metrics
    rows, shaping = [rows[i] for i in scored], shaping[scored]
    advantages, new = rules.advantages(_credit_inputs(rows, shaping, rules))
    merge_into(metrics, new)
    samples = [
        _sample(index, row, float(advantages[index]), row.trajectory.reward + float(shaping[index]), rules)
        for index, row in enumerate(rows)
    ]
    emptied = sum(not sample.loss_mask.any() for sample in samples)
    return samples, merge_into(metrics, {"advantage/masked_samples": Sum(float(emptied))})


def _credit_inputs(rows: Sequence[Row], shaping: np.ndarray, rules: CreditRules) -> CreditInputs:
    names = list(rules.reward_weights)
    components = np.array([[row.trajectory.reward_components.get(name, 0.0) for name in names] for row in rows])
    components = components.reshape(len(rows), len(names))
    uncounted = [i for i, row in enumerate(rows) if not rules.counts(row.trajectory)]
    components[uncounted] = np.nan
    return CreditInputs(
        rewards=torch.from_numpy(components.astype(np.float64)),
        reward_weights=torch.tensor([rules.reward_weights[name] for name in names], dtype=torch.float64),
        group_ids=torch.tensor([row.group_id for row in rows]),
        lengths=torch.tensor([row.trajectory.response_length for row in rows]),
        prompt_ids=tuple(row.prompt_id for row in rows),
        shaping=torch.from_numpy(shaping.astype(np.float64)),
    )


def _sample(index: int, row: Row, advantage: float, reward: float, rules: CreditRules) -> Sample:
    trajectory = row.trajectory
    mask = trajectory.loss_mask if rules.keeps(trajectory) else np.zeros_like(trajectory.loss_mask)
    return Sample(
        sample_id=index,
        group_id=row.group_id,
        prompt_id=row.prompt_id,
        token_ids=trajectory.token_ids,
        loss_mask=mask,
        rollout_logprobs=trajectory.rollout_logprobs,
        advantages=np.where(mask, np.float32(advantage), np.float32(0.0)),
        reward=reward,
        temperature=trajectory.temperature,
        routed_experts=trajectory.routed_experts,
        has_route=trajectory.has_route,
        support=trajectory.support,
    )
