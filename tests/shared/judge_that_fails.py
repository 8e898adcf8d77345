"""A reward whose judge of held-out answers is down for as long as a file is there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, UnscoredError
from moerl.rewards.pool import SandboxPool
from moerl.types import Prompt


@dataclass
class JudgeConfig(RewardConfig):
    """Where the file may be."""

    down: str = ""


@rewards.register("judge", JudgeConfig)
class Judge:
    """0 or 1 by the answer's text."""

    def __init__(self, config: JudgeConfig, pool: SandboxPool) -> None:
        self._down = Path(config.down)

    async def score(self, prompt: Prompt, text: str) -> float:
        if prompt.dataset == "heldout" and self._down.exists():
            raise UnscoredError("exception", "the judge is down")
        return float(hashlib.sha256(f"{prompt.prompt_id} {text}".encode()).digest()[0] % 2)

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return [None] * len(prompts)
