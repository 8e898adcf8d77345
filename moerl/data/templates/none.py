"""No template: the question as it is."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.data.rows import Row
from moerl.data.templates import prompt_templates
from moerl.data.templating import ChatTemplate, PromptText, question_of


@dataclass(frozen=True)
class NoneConfig:
    """No arguments."""


@prompt_templates.register("none", NoneConfig)
def none(row: Row, chat: ChatTemplate, cfg: NoneConfig) -> PromptText:
    """The question."""
    return PromptText(question_of(row, "none"))
