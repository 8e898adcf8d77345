"""Reward statistics of every prompt over its visits (DCPO, arXiv 2509.02333)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moerl.errors import CheckpointError

HISTORY = "prompt_history"
"""Key of `CreditInputs.state` where the history is."""


@dataclass(frozen=True)
class Pooled:
    """All answers to one prompt so far."""

    visits: int = 0
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    def std(self, ddof: int) -> float:
        """Standard deviation over all answers."""
        return math.sqrt(self.squares / max(self.count - ddof, 1))

    def joined(self, count: int, mean: float, squares: float) -> Pooled:
        """With one more visit of `count` answers; exact for visits of any size."""
        total = self.count + count
        gap = mean - self.mean
        return Pooled(
            self.visits + 1,
            total,
            self.mean + gap * count / total,
            self.squares + squares + gap * gap * self.count * count / total,
        )


@dataclass
class PromptHistory:
    """Prompt id -> statistics; part of a checkpoint."""

    prompts: dict[str, Pooled] = field(default_factory=dict)

    def visit(self, prompt_id: str, rewards: list[float]) -> Pooled:
        """Add the scored rewards of one visit (at least one); returns the statistics with them."""
        mean = math.fsum(rewards) / len(rewards)
        squares = math.fsum((reward - mean) ** 2 for reward in rewards)
        self.prompts[prompt_id] = self.prompts.get(prompt_id, Pooled()).joined(len(rewards), mean, squares)
        return self.prompts[prompt_id]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: [p.visits, p.count, p.mean, p.squares] for name, p in self.prompts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them.

        Raises:
            CheckpointError: not what `state_dict` returned.
        """
        try:
            self.prompts = {
                name: Pooled(int(visits), int(count), float(mean), float(squares))
                for name, (visits, count, mean, squares) in state.items()
            }
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the statistics of the prompts are damaged ({error}); use another checkpoint"
            ) from error
