"""Rewards of one step and the statistics that advantages are made of; float64, two-pass, rows in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.types import CreditInputs
from moerl.config.schema import AdvantageSection

ZERO_VARIANCE = 1e-9
"""Rewards of a group that differ by no more than this are equal."""


@dataclass(frozen=True)
class RewardTable:
    """All rows of a step; unscored ones take no part in any statistic."""

    settings: AdvantageSection
    rewards: Tensor
    """[n] float64: weighted sum of the components plus shaping; 0 where unscored."""
    components: Tensor
    """[n, c] float64; 0 where unscored."""
    component_weights: Tensor
    """[c] float64."""
    shaping: Tensor
    """[n] float64."""
    scored: Tensor
    """[n] bool."""
    groups: Tensor
    """[n] int64 in 0..num_groups-1."""
    num_groups: int
    prompt_ids: tuple[str, ...]
    """[n]."""
    state: Mapping[str, Any]
    """Of rules that keep any."""

    @classmethod
    def build(cls, settings: AdvantageSection, x: CreditInputs) -> RewardTable:
        """Weigh and add the components; a row with anything that is not finite is unscored."""
        components = x.rewards.double()
        rewards = components @ x.reward_weights.double() + x.shaping.double()
        scored = rewards.isfinite() & components.isfinite().all(1)
        labels, groups = x.group_ids.unique(return_inverse=True)
        return cls(
            settings,
            torch.where(scored, rewards, 0),
            torch.where(scored.unsqueeze(1), components, 0),
            x.reward_weights.double(),
            torch.where(scored, x.shaping.double(), 0),
            scored,
            groups,
            len(labels),
            x.prompt_ids,
            x.state,
        )

    @property
    def counts(self) -> Tensor:
        """[num_groups] float64: scored rows."""
        return self._group_sum(self.scored.double())

    def flat_groups(self, values: Tensor) -> Tensor:
        """[num_groups] bool: the scored `values` [n] of the group are all equal; also groups of one and of none."""
        high = self._group_extreme(torch.where(self.scored, values, -torch.inf), "amax")
        low = self._group_extreme(torch.where(self.scored, values, torch.inf), "amin")
        return ~(high - low > ZERO_VARIANCE)

    def standardize(self, values: Tensor) -> Tensor:
        """(values - center) / (scale + eps), [n] float64; exactly 0 for unscored rows and for groups without spread.

        A group of one follows `settings.singleton`. `values` [n] may be the rewards or one component of them.
        """
        settings = self.settings
        values = torch.where(self.scored, values, 0)
        centred = torch.where(self.scored, self._centred(values), 0)
        result = centred
        if settings.scale != "none":
            result = centred / (self._scale(values, centred) + settings.eps)
        if settings.center.startswith("group") or settings.scale == "group_std":
            result = torch.where(self.flat_groups(values)[self.groups], 0, result)
        elif (settings.center == "batch_mean" or settings.scale.startswith("batch")) and self.is_flat_batch(values):
            result = torch.zeros_like(result)
        if settings.singleton == "raw":
            result = torch.where(self.counts[self.groups] == 1, values, result)
        return torch.where(self.scored, result, 0)

    def batch_mean(self, values: Tensor) -> Tensor:
        """0-dim: mean over scored rows."""
        return torch.where(self.scored, values, 0).sum() / self.scored.sum().clamp(min=1)

    def batch_std(self, values: Tensor) -> Tensor:
        """0-dim: standard deviation over scored rows."""
        squares = torch.where(self.scored, (values - self.batch_mean(values)).square(), 0).sum()
        return (squares / (self.scored.sum() - self.settings.std_ddof).clamp(min=1)).sqrt()

    def is_flat_batch(self, values: Tensor) -> bool:
        """The scored `values` [n] are all equal, or there are none."""
        seen = values[self.scored]
        return not len(seen) or bool(seen.max() - seen.min() <= ZERO_VARIANCE)

    def _centred(self, values: Tensor) -> Tensor:
        center = self.settings.center
        if center in ("none", "history", "value"):
            return values
        if center == "batch_mean":
            return values - self.batch_mean(values)
        counts = self.counts.clamp(min=1)
        centred = values - (self._group_sum(values) / counts)[self.groups]
        if center == "group_loo":
            centred = centred * (counts / (counts - 1).clamp(min=1))[self.groups]
        return centred

    def _scale(self, values: Tensor, centred: Tensor) -> Tensor:
        if self.settings.scale == "batch_std_raw":
            return self.batch_std(values)
        if self.settings.scale == "batch_std_centered":
            return self.batch_std(centred)
        counts = self.counts
        mean = (self._group_sum(values) / counts.clamp(min=1))[self.groups]
        squares = self._group_sum(torch.where(self.scored, (values - mean).square(), 0))
        return (squares / (counts - self.settings.std_ddof).clamp(min=1)).sqrt()[self.groups]

    def _group_sum(self, values: Tensor) -> Tensor:
        return torch.zeros(self.num_groups, dtype=torch.float64).index_add(0, self.groups, values)

    def _group_extreme(self, values: Tensor, reduce: str) -> Tensor:
        empty = torch.zeros(self.num_groups, dtype=torch.float64)
        return empty.scatter_reduce(0, self.groups, values, reduce, include_self=False)
