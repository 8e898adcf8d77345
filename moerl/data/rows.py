"""`Row`: one task as its source has it, before tokenisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One task in plain text. Sources make rows; `prompts.load_dataset` tokenises them."""

    index: int
    """Position in the source, 0-based; it makes the prompt's id, so it does not depend on what is skipped."""
    prompt: str | list[dict[str, str]]
    """Text, or chat messages of `role` and `content`."""
    answer: str | None
    """Gold answer."""
    source: str
    """`file:line`, `file:row n`, or `task#index`: what an error message points at."""
    completion: str | None = None
    """Text to imitate (supervised training)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Every other column."""

    @property
    def text(self) -> str:
        """The prompt as a person reads it."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message["content"] for message in self.prompt)
