"""The tokenizer's own chat template, with the generation prompt."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.data.rows import Row
from moerl.data.templates import prompt_templates
from moerl.data.templating import ChatTemplate, PromptText


@dataclass(frozen=True)
class ChatConfig:
    """What comes before the task."""

    system: str | None = None
    """A system message, for rows that have none."""


@prompt_templates.register("chat", ChatConfig)
def chat(row: Row, chat: ChatTemplate, cfg: ChatConfig) -> PromptText:
    """A text is one user message."""
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
    if cfg.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": cfg.system})
    return PromptText(chat.apply_chat_template(messages, row.source), add_special_tokens=False)
