"""What a prompt template is: a named function from a task to the text that a policy continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from moerl.data.rows import Row
from moerl.data.templates import prompt_templates
from moerl.errors import DataError


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt before it is tokenised."""

    text: str
    add_special_tokens: bool = True
    """Whether the tokenizer puts its start token before it; a chat template has written its own."""


class ChatTemplate(Protocol):
    """The chat template that the tokenizer brings; `data.chat.ChatTokenizer` is one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether there is one."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], source: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Messages up to where the answer starts, with the JSON schemas of `tools`.

        Raises `DataError` where there is no template, or it refuses them or says nothing of the tools.
        """
        ...


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """One template with its arguments."""

    name: str
    render: Callable[[Row, ChatTemplate], PromptText]
    extract: str
    """Where it asks for the answer: a word of `rewards.extract.EXTRACTS`."""
    stop: tuple[str, ...]
    """Strings after which an answer is complete."""


def resolve_template(node: Mapping[str, Any]) -> PromptTemplate:
    """A configuration node such as `{name: r1}` as the template that it names.

    Raises:
        ConfigError: no such template, or an argument that it does not take.
    """
    plugin, cfg = prompt_templates.resolve(node, where="data.template")
    return PromptTemplate(
        plugin.name,
        partial(plugin.target, cfg=cfg),
        extract=plugin.traits.get("extract", "boxed"),
        stop=tuple(plugin.traits.get("stop", ())),
    )


def rewritten(template: PromptTemplate, rewrite: Callable[[str], str]) -> PromptTemplate:
    """`template` around `rewrite(task)`: of a conversation, around its last message of the user."""

    def render(row: Row, chat: ChatTemplate) -> PromptText:
        if isinstance(row.prompt, str):
            return template.render(replace(row, prompt=rewrite(row.prompt)), chat)
        asked = [i for i, message in enumerate(row.prompt) if message["role"] == "user"]
        if not asked:
            raise DataError(f"{row.source}: has no message of the user, and rollout.environment rewrites the task")
        messages = [dict(message) for message in row.prompt]
        messages[asked[-1]]["content"] = rewrite(messages[asked[-1]]["content"])
        return template.render(replace(row, prompt=messages), chat)

    return replace(template, render=render)


@dataclass(frozen=True, slots=True)
class _Announcing:
    """A chat template that is always told of the same tools."""

    inner: ChatTemplate
    tools: Sequence[Mapping[str, Any]]

    @property
    def has_chat_template(self) -> bool:
        return self.inner.has_chat_template

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], source: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        return self.inner.apply_chat_template(messages, source, [*self.tools, *tools])


def announcing(template: PromptTemplate, tools: Sequence[Mapping[str, Any]]) -> PromptTemplate:
    """`template` whose chat template announces `tools` (JSON schemas of functions)."""

    def render(row: Row, chat: ChatTemplate) -> PromptText:
        return template.render(row, _Announcing(chat, tools))

    return replace(template, render=render) if tools else template


def question_of(row: Row, template: str) -> str:
    """The task as one text, for a template that is text around a question.

    Raises:
        DataError: the row is a conversation, which only a chat template can write down.
    """
    if isinstance(row.prompt, str):
        return row.prompt
    if [message["role"] for message in row.prompt] == ["user"]:
        return row.prompt[0]["content"]
    raise DataError(
        f"{row.source}: has messages of {', '.join(message['role'] for message in row.prompt)}, and data.template is "
        f"{template}, which takes one question; use chat or auto"
    )
