"""How often the policy solved a prompt, over the steps that it was sampled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moerl.errors import CheckpointError


@dataclass(frozen=True)
class PassRate:
    """One prompt's history; nothing yet by default."""

    answers: int = 0
    passed: int = 0
    recent_answers: int = 0
    """Of its last visit."""
    recent_passed: int = 0
    step: int = 0
    """Of its last visit."""

    @property
    def overall(self) -> float | None:
        """Share of all answers that passed; None where there is none."""
        return self.passed / self.answers if self.answers else None

    @property
    def recent(self) -> float | None:
        """Share of the last visit's answers that passed; None where there is none."""
        return self.recent_passed / self.recent_answers if self.recent_answers else None


@dataclass
class PassRates:
    """Prompt id -> history; part of a checkpoint."""

    prompts: dict[str, PassRate] = field(default_factory=dict)

    def visit(self, prompt_id: str, answers: int, passed: int, step: int) -> None:
        """Add one visit with `answers` scored answers; one without any leaves no trace."""
        if not answers:
            return
        before = self.prompts.get(prompt_id, PassRate())
        self.prompts[prompt_id] = PassRate(before.answers + answers, before.passed + passed, answers, passed, step)

    def of(self, prompt_id: str) -> PassRate:
        """The history of one prompt."""
        return self.prompts.get(prompt_id, PassRate())

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            name: [rate.answers, rate.passed, rate.recent_answers, rate.recent_passed, rate.step]
            for name, rate in self.prompts.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them.

        Raises:
            CheckpointError: not what `state_dict` returned.
        """
        try:
            self.prompts = {name: PassRate(*(int(value) for value in values)) for name, values in state.items()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the pass rates are damaged ({error}); use another checkpoint") from error
