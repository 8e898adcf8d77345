"""DCPO's smooth advantage standardisation (arXiv 2509.02333): this visit's statistics and all visits' together.

At a prompt's j-th visit, with A_new from this visit and A_tot from all of them: SA_new = ((j - 1) A_new + A_tot) / j,
SA_tot = (A_new + (j - 1) A_tot) / j, and A is the one of smaller absolute value (SA_tot where they tie).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.advantage.history import HISTORY, PromptHistory
from moerl.algorithms.advantage.reward_table import ZERO_VARIANCE, RewardTable
from moerl.algorithms.registries import advantage_transforms
from moerl.errors import ConfigError


@dataclass(frozen=True)
class SasConfig:
    """No arguments."""


def smoothed(new: Tensor, total: Tensor, visits: int) -> Tensor:
    """The advantage [g] at visit number `visits` from the two standardisations [g]."""
    by_new = ((visits - 1) * new + total) / visits
    by_total = (new + (visits - 1) * total) / visits
    return torch.where(by_new.abs() < by_total.abs(), by_new, by_total)


@advantage_transforms.register("sas", SasConfig, keeps_history=True)
def sas(table: RewardTable, cfg: SasConfig) -> Tensor:
    """Adds this step's rewards to the history; a standard deviation below 1e-9 gives 0."""
    history = table.state.get(HISTORY)
    if not isinstance(history, PromptHistory):
        raise ConfigError(
            "algorithm.advantage.transform sas needs the prompt history: pass CreditInputs.state={'prompt_history': "
            "PromptHistory()}, the same object at every step"
        )
    result = torch.zeros_like(table.rewards)
    for group in range(table.num_groups):
        rows = ((table.groups == group) & table.scored).nonzero().squeeze(1)
        if not len(rows):
            continue
        rewards = table.rewards[rows]
        pooled = history.visit(table.prompt_ids[int(rows[0])], rewards.tolist())
        new = _standardised(rewards, float(rewards.mean()), _std(rewards, table.settings.std_ddof), table)
        total = _standardised(rewards, pooled.mean, pooled.std(table.settings.std_ddof), table)
        result[rows] = smoothed(new, total, pooled.visits)
    return result


def _std(rewards: Tensor, ddof: int) -> float:
    return float(((rewards - rewards.mean()).square().sum() / max(len(rewards) - ddof, 1)).sqrt())


def _standardised(rewards: Tensor, mean: float, std: float, table: RewardTable) -> Tensor:
    return torch.zeros_like(rewards) if std < ZERO_VARIANCE else (rewards - mean) / (std + table.settings.eps)
