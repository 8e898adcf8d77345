"""Group credit of one step: A = post(transform((R - center) / (scale + eps)))."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.advantage.reward_table import RewardTable
from moerl.algorithms.registries import advantage_posts, advantage_transforms
from moerl.algorithms.types import CreditInputs
from moerl.config.schema import AdvantageSection
from moerl.metrics import Max, Mean, Metrics, Min, Sum


def group_advantages(cfg: AdvantageSection, x: CreditInputs) -> tuple[Tensor, Metrics]:
    """One advantage per row, [n] float64, detached; rows and group labels in any order.

    A row whose reward is NaN is out of every statistic and gets 0. A group without spread gets exact zeros wherever
    the center or the scale is of the group. A `post` that acts on tokens is left to the token credit.

    Raises:
        ConfigError: an unknown transform or post, or one of its arguments.
    """
    table = RewardTable.build(cfg, x)
    transform, transform_cfg = advantage_transforms.resolve(cfg.transform, where="algorithm.advantage.transform")
    post, post_cfg = advantage_posts.resolve(cfg.post, where="algorithm.advantage.post")
    advantages = transform.target(table, transform_cfg)
    if post.traits.get("acts_on") != "tokens":
        advantages = post.target(advantages, table.scored, post_cfg)
    advantages = torch.where(table.scored, advantages, 0.0)
    return advantages, _metrics(table, advantages)


def _metrics(table: RewardTable, advantages: Tensor) -> Metrics:
    seen = advantages[table.scored]
    count = float(len(seen))
    flat = table.flat_groups(table.rewards) & (table.counts > 1)
    counted: Metrics = {
        "advantage/zero_variance_groups": Sum(int(flat.sum())),
        "advantage/singleton_groups": Sum(int((table.counts == 1).sum())),
        "advantage/unscored": Sum(int((~table.scored).sum())),
    }
    if table.settings.center == "value":  # these are rewards still; advantages come with the values
        return counted
    return {
        **counted,
        "advantage/mean": Mean(float(seen.sum()), count),
        "advantage/abs_mean": Mean(float(seen.abs().sum()), count),
        "advantage/max": Max(float(seen.max()) if count else float("-inf")),
        "advantage/min": Min(float(seen.min()) if count else float("inf")),
    }
