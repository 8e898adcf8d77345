"""A reward by an answer's text alone: for a fake server's answers, of which none is right but by chance."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig
from moerl.rewards.pool import SandboxPool
from moerl.types import Prompt


@rewards.register("drawn", RewardConfig)
class Drawn:
    """1 for about half of the answers, 0 for the others."""

    def __init__(self, config: RewardConfig, pool: SandboxPool) -> None:
        pass

    async def score(self, prompt: Prompt, text: str) -> float:
        return float(hashlib.sha256(text.encode()).digest()[0] % 2)

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return [None] * len(prompts)
