"""1 where a pattern's last match captures the gold answer; in the pool, as patterns can hang on hostile text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from moerl.errors import ConfigError
from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, judge, need_answers
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt


@dataclass
class RegexMatchConfig(RewardConfig):
    """Which pattern."""

    pattern: str = MISSING
    """Python regular expression; the group `answer`, or else the first one, is compared with the gold answer."""
    ignore_case: bool = False


@rewards.register("regex_match", RegexMatchConfig)
class RegexMatch:
    """Compares stripped strings; `.` also matches a line's end."""

    def __init__(self, config: RegexMatchConfig, pool: SandboxPool) -> None:
        """Raises `ConfigError` for a pattern that is none, or has no group."""
        try:
            groups = re.compile(config.pattern).groups
        except re.error as error:
            raise ConfigError(
                f"reward regex_match: pattern {config.pattern!r} is no regular expression ({error})"
            ) from error
        if groups == 0:
            raise ConfigError(
                f"reward regex_match: pattern {config.pattern!r} has no group; put (...) around the part that is the "
                f"answer"
            )
        self._config = config
        self._pool = pool

    async def score(self, prompt: Prompt, text: str) -> float:
        """0 also where nothing matches."""
        kwargs = {"pattern": self._config.pattern, "ignore_case": self._config.ignore_case}
        found = await judge(
            self._pool, "moerl.rewards.judges.text:captures", text=text, gold=prompt.answer or "", **kwargs
        )
        return float(found)

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """A gold answer must be there."""
        return need_answers(prompts)
