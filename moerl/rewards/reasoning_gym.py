"""The score that a reasoning-gym generator gives; several call `eval` on the answer, so it runs in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, UnscoredError, check_choice, judge
from moerl.rewards.extract import EXTRACTS, extract_answer
from moerl.rewards.judges.codec import to_plain
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt


@dataclass
class ReasoningGymRewardConfig(RewardConfig):
    """Where the answer is."""

    extract: str = "boxed"
    """`boxed`, `last_line`, `answer_tag` or `all`."""


@rewards.register("reasoning_gym", ReasoningGymRewardConfig)
class ReasoningGym:
    """`score_answer` of the task in `metadata["task"]` on `metadata["entry"]`; values from 0 to 1."""

    def __init__(self, config: ReasoningGymRewardConfig, pool: SandboxPool) -> None:
        check_choice(config.extract, EXTRACTS, where="reward reasoning_gym: extract")
        self._config = config
        self._pool = pool

    async def score(self, prompt: Prompt, text: str) -> float:
        """0 where there is no answer to extract."""
        if problem := _problem(prompt):
            raise UnscoredError("exception", problem)
        answer = extract_answer(text, self._config.extract)
        if answer is None:
            return 0.0
        metadata = prompt.metadata
        kwargs = {"task": metadata["task"], "config": metadata.get("config", {}), "entry": to_plain(metadata["entry"])}
        return await judge(self._pool, "moerl.rewards.judges.gym:score_answer", answer=answer, **kwargs)

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Prompts must come from the `reasoning_gym` source."""
        return [_problem(prompt) for prompt in prompts]


def _problem(prompt: Prompt) -> str | None:
    lacking = [key for key in ("task", "entry") if key not in prompt.metadata]
    if lacking:
        return f"lacks metadata {lacking}; the reward reasoning_gym is for prompts of the source reasoning_gym"
    return None
