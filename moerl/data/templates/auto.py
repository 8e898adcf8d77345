"""`chat` for rows of messages and where the tokenizer has a chat template, else `none`."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.data.rows import Row
from moerl.data.templates import prompt_templates
from moerl.data.templates.chat import ChatConfig
from moerl.data.templates.chat import chat as chat_template
from moerl.data.templates.none import NoneConfig, none
from moerl.data.templating import ChatTemplate, PromptText


@dataclass(frozen=True)
class AutoConfig:
    """No arguments."""


@prompt_templates.register("auto", AutoConfig)
def auto(row: Row, chat: ChatTemplate, cfg: AutoConfig) -> PromptText:
    """What the tokenizer was made for."""
    if isinstance(row.prompt, str) and not chat.has_chat_template:
        return none(row, chat, NoneConfig())
    return chat_template(row, chat, ChatConfig())
