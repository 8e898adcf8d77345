"""An aggregation in which one rank falls asleep, and a reward whose judge does."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.aggregation import Lengths
from moerl.algorithms.registries import aggregations
from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig
from moerl.rewards.pool import SandboxPool
from moerl.types import Prompt

LONG_SECONDS = 600.0
"""Longer than any test waits."""


@dataclass(frozen=True)
class AggregationConfig:
    """No arguments."""


@aggregations.register("equally", AggregationConfig)
def equally(lengths: Lengths, cfg: AggregationConfig) -> Tensor:
    """The same for all; rank 1 gets no further."""
    if os.environ["RANK"] == "1":
        time.sleep(LONG_SECONDS)
    return torch.full_like(lengths.tokens, 1 / len(lengths.tokens))


def sleep() -> None:
    """What the judge does."""
    time.sleep(LONG_SECONDS)


@rewards.register("judge", RewardConfig)
class Judge:
    """No verdict before anybody has lost patience."""

    def __init__(self, config: RewardConfig, pool: SandboxPool) -> None:
        self._pool = pool

    async def score(self, prompt: Prompt, text: str) -> float:
        await self._pool.run("asleep:sleep", {}, timeout_seconds=LONG_SECONDS)
        return 0.0

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return [None] * len(prompts)
