"""Groups to samples: rewards become advantages, filters empty masks. Every credit decision of a step is made here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    members: Callable[[RolloutGroup], Members] | None = None
    """As `keeps` and `counts`, for rules that look at the whole group."""
    trains_on_zero: bool = True
    """False empties the masks of answers with advantage 0 (objectives of pairs)."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Of advantage rules that keep any."""


@dataclass(frozen=True)
class Members:
    """Verdicts on the trajectories of one group."""

    kept: np.ndarray
    """[g] bool: False empties the trajectory's mask."""
    counted: np.ndarray
    """[g] bool: False takes it out of the group's statistics too."""


@dataclass(frozen=True)
class Row:
    """One trajectory with its place in the step."""

    group_id: int
    prompt_id: str
    trajectory: Trajectory
    kept: bool
    counted: bool


def credit(groups: Sequence[RolloutGroup], rules: CreditRules) -> tuple[list[Sample], Metrics]:
    """Samples of all scored trajectories, in group order, and the metrics of the decision.

    A trajectory that failed or could not be scored is no sample: it neither trains nor counts in a denominator. Its
    group's statistics are those of the others.
    """
    shaping, metrics = rules.shaping(groups)
    rows = [row for g, group in enumerate(groups) for row in _rows(g, group, rules)]
    scored = [i for i, row in enumerate(rows) if row.trajectory.is_scored]
    if not scored:
        return [], metrics
    pairs = enumerate((rows[i], float(shaping[i])) for i in scored)
    samples = [_sample(index, row, bonus, rules) for index, (row, bonus) in pairs]
    advantages, new = rules.advantages(credit_inputs(samples, rules.reward_weights, rules.state))
    merge_into(metrics, new)
    samples = [
        _credited(sample, float(advantage), rules) for sample, advantage in zip(samples, advantages, strict=True)
    ]
    if not rules.trains_on_zero:
        samples = _whole_pairs(samples)
    emptied = sum(not sample.loss_mask.any() for sample in samples)
    return samples, merge_into(metrics, {"advantage/masked_samples": Sum(float(emptied))})


def credit_inputs(
    samples: Sequence[Sample], reward_weights: Mapping[str, float], state: Mapping[str, Any]
) -> CreditInputs:
    """What the credit rule sees of all samples of a step, in their order."""
    components = [sample.components for sample in samples if sample.components is not None]
    return CreditInputs(
        rewards=torch.from_numpy(np.array(components, dtype=np.float64).reshape(len(samples), len(reward_weights))),
        reward_weights=torch.tensor(list(reward_weights.values()), dtype=torch.float64),
        group_ids=torch.tensor([sample.group_id for sample in samples]),
        lengths=torch.tensor([sample.response_length for sample in samples]),
        prompt_ids=tuple(sample.prompt_id for sample in samples),
        shaping=torch.tensor([sample.shaping for sample in samples], dtype=torch.float64),
        state=state,
    )


def in_whole_pairs(advantages: np.ndarray, group_ids: np.ndarray, live: np.ndarray) -> np.ndarray:
    """[n] bool: answers that are the better or the worse one of a pair of which both have a live token.

    Args:
        advantages: [n], above 0 for the better one of a group, below 0 for the worse one.
        group_ids: [n].
        live: [n] bool.
    """
    better, worse = group_ids[live & (advantages > 0)], group_ids[live & (advantages < 0)]
    return live & (advantages != 0) & np.isin(group_ids, better) & np.isin(group_ids, worse)


def _whole_pairs(samples: Sequence[Sample]) -> list[Sample]:
    """Without the half pairs that are left where a filter masked the other answer."""
    signs = np.array([sample.advantages[sample.loss_mask][:1].sum() for sample in samples])
    groups = np.array([sample.group_id for sample in samples])
    kept = in_whole_pairs(signs, groups, np.array([sample.loss_mask.any() for sample in samples]))
    return [
        sample if keep else replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
        for sample, keep in zip(samples, kept, strict=True)
    ]


def _rows(group_id: int, group: RolloutGroup, rules: CreditRules) -> list[Row]:
    everything = np.ones(len(group.trajectories), dtype=bool)
    members = Members(everything, everything) if rules.members is None else rules.members(group)
    return [
        Row(
            group_id,
            group.prompt.prompt_id,
            trajectory,
            kept=bool(kept) and rules.keeps(trajectory),
            counted=bool(counted) and rules.counts(trajectory),
        )
        for trajectory, kept, counted in zip(group.trajectories, members.kept, members.counted, strict=True)
    ]


def _sample(index: int, row: Row, shaping: float, rules: CreditRules) -> Sample:
    """Without credit yet."""
    trajectory = row.trajectory
    components = np.array([trajectory.reward_components.get(name, 0.0) for name in rules.reward_weights])
    return Sample(
        sample_id=index,
        group_id=row.group_id,
        prompt_id=row.prompt_id,
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask if row.kept else np.zeros_like(trajectory.loss_mask),
        rollout_logprobs=trajectory.rollout_logprobs,
        advantages=np.zeros(len(trajectory.token_ids), dtype=np.float32),
        reward=trajectory.reward + shaping,
        temperature=trajectory.temperature,
        routed_experts=trajectory.routed_experts,
        has_route=trajectory.has_route,
        support=trajectory.support,
        top_logprobs=trajectory.top_logprobs,
        components=components if row.counted else np.full_like(components, np.nan, dtype=np.float64),
        shaping=shaping,
        response_length=trajectory.response_length,
    )


def _credited(sample: Sample, advantage: float, rules: CreditRules) -> Sample:
    mask = sample.loss_mask
    if not rules.trains_on_zero and advantage == 0:
        mask = np.zeros_like(mask)
    return replace(sample, loss_mask=mask, advantages=np.where(mask, np.float32(advantage), np.float32(0.0)))
