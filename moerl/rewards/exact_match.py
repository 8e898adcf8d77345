"""1 where the extracted answer is the gold answer, character by character (white space at the ends aside)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, check_choice, need_answers
from moerl.rewards.extract import EXTRACTS, extract_answer
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt


@dataclass
class ExactMatchConfig(RewardConfig):
    """Where the answer is."""

    extract: str = "boxed"
    """`boxed`, `last_line`, `answer_tag` or `all`."""
    ignore_case: bool = False


@rewards.register("exact_match", ExactMatchConfig)
class ExactMatch:
    """String comparison; needs no process."""

    def __init__(self, config: ExactMatchConfig, pool: SandboxPool) -> None:
        """`pool` is not used."""
        check_choice(config.extract, EXTRACTS, where="reward exact_match: extract")
        self._config = config

    async def score(self, prompt: Prompt, text: str) -> float:
        """0 also where there is no answer to extract."""
        answer = extract_answer(text, self._config.extract)
        gold = (prompt.answer or "").strip()
        if self._config.ignore_case:
            answer, gold = answer and answer.casefold(), gold.casefold()
        return float(answer == gold)

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """A gold answer must be there."""
        return need_answers(prompts)
