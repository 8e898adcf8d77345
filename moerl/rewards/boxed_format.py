r"""1 where the text gives exactly one `\boxed{...}` that is not empty: a reward for the form, whatever the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig
from moerl.rewards.extract import last_boxed
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt


@dataclass
class BoxedFormatConfig(RewardConfig):
    """How strict."""

    only_one: bool = True
    """More than one box scores 0."""


@rewards.register("boxed_format", BoxedFormatConfig)
class BoxedFormat:
    """String search; needs no process."""

    def __init__(self, config: BoxedFormatConfig, pool: SandboxPool) -> None:
        """`pool` is not used."""
        self._config = config

    async def score(self, prompt: Prompt, text: str) -> float:
        """1 or 0."""
        is_one = text.count("\\boxed") == 1 or not self._config.only_one
        return float(is_one and bool(last_boxed(text)))

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Needs nothing of a prompt."""
        return [None] * len(prompts)
