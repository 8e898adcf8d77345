"""Prompt templates by name: each file registers one function from a task to the text that a policy continues.

    @prompt_templates.register("mine", MineConfig, extract="answer_tag", stop=("</answer>",))
    def mine(row: Row, chat: ChatTemplate, cfg: MineConfig) -> PromptText: ...

`extract` says where the template asks for the answer (`boxed` unless said otherwise): rewards that are not told where
to look look there. `stop` are strings after which an answer is complete.
"""

from __future__ import annotations

from typing import Any

from moerl.registry import Registry

prompt_templates: Registry[Any] = Registry("prompt template", "moerl.data.templates")
