"""GDPO's reward-decoupled advantages (arXiv 2601.05242): components are normalised in their group, then summed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moerl.algorithms.advantage.reward_table import RewardTable
from moerl.algorithms.registries import advantage_transforms
from moerl.errors import ConfigError


@dataclass(frozen=True)
class DecoupledConfig:
    """How the components come together."""

    weights: list[float] = field(default_factory=list)
    """One per reward; empty takes the weights of the rewards themselves."""
    batch_norm: bool = True
    """Normalise the sum over the sequences of the batch."""


@advantage_transforms.register("decoupled", DecoupledConfig)
def decoupled(table: RewardTable, cfg: DecoupledConfig) -> Tensor:
    """Weighted sum of standardised components; shaping, where there is any, is one more component of weight 1."""
    num_components = table.components.shape[1]
    if cfg.weights and len(cfg.weights) != num_components:
        raise ConfigError(
            f"algorithm.advantage.transform.weights has {len(cfg.weights)} numbers for {num_components} rewards; "
            "give one each, or leave it empty"
        )
    weights = cfg.weights or table.component_weights.tolist()
    parts = list(zip(weights, table.components.unbind(1), strict=True))
    if table.shaping.any():
        parts.append((1.0, table.shaping))
    total = torch.zeros_like(table.rewards)
    for weight, component in parts:
        total = total + weight * table.standardize(component)
    if not cfg.batch_norm:
        return total
    if table.is_flat_batch(total):  # components that cancel leave rounding, which eps alone would divide
        return torch.zeros_like(total)
    # Rows of groups where nothing differs are exact zeros and stay so, whatever rounding the batch mean has.
    normalised = (total - table.batch_mean(total)) / (table.batch_std(total) + table.settings.eps)
    return torch.where(total == 0, 0, normalised) if _is_centred(table) else normalised


def _is_centred(table: RewardTable) -> bool:
    """Group-centred sums have a batch mean of 0 but for rounding."""
    return table.settings.center in ("group_mean", "group_loo")
