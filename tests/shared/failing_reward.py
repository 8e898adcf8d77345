"""A reward that has no verdict for about a third of the answers, which ones by their text alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, UnscoredError
from moerl.rewards.pool import SandboxPool
from moerl.types import Prompt


@rewards.register("failing", RewardConfig)
class Failing:
    """0 or 1, or nothing."""

    def __init__(self, config: RewardConfig, pool: SandboxPool) -> None:
        pass

    async def score(self, prompt: Prompt, text: str) -> float:
        drawn = int.from_bytes(hashlib.sha256(f"c {prompt.prompt_id} {text}".encode()).digest()[:4], "big")
        if drawn % 3 == 0:
            raise UnscoredError("exception", "on purpose")
        return float(drawn % 2)

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return [None] * len(prompts)
