"""Finds the calls of tools in a model's text. No text makes it raise, and it is linear in the text's length.

Two ways of writing a call between its markers:

    json      <tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>     (Qwen, Hermes)
    argument  <3+4>: the whole body is the one argument of the one tool
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moerl.errors import ConfigError

BODIES = ("json", "argument")
MAX_BODY_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written."""

    opening: str
    closing: str
    body: str
    """A word of `BODIES`."""
    after: str = ""
    """Where the text holds it, only what follows its last occurrence is read, such as `</think>`."""

    def check(self, where: str) -> None:
        """Raises `ConfigError` for markers that are blank or hold one another, or another word for `body`."""
        for name, marker in (("call_open", self.opening), ("call_close", self.closing)):
            if not marker.strip():
                raise ConfigError(f"{where}.{name} is {marker!r}; it must hold a character that is not white space")
        if self.opening in self.closing or self.closing in self.opening:
            raise ConfigError(
                f"{where}.call_open={self.opening!r} and call_close={self.closing!r}: neither may be part of the other"
            )
        if self.body not in BODIES:
            raise ConfigError(f"{where}.body is {self.body!r}; allowed: {', '.join(BODIES)}")


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it was written; `name` is empty where the body is the argument alone."""

    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Malformed:
    """What opens like a call and is none."""

    reason: str
    """For the model to read."""


def parse_calls(text: str, how: CallFormat) -> list[Call | Malformed]:
    """Calls in the order in which they stand."""
    if how.after and how.after in text:
        text = text.rpartition(how.after)[2]
    found: list[Call | Malformed] = []
    unclosed = Malformed("a call was opened and not closed")
    start = text.find(how.opening)
    while start >= 0:
        start += len(how.opening)
        end, again = text.find(how.closing, start), text.find(how.opening, start)
        if end < 0:
            return [*found, unclosed]
        if 0 <= again < end:
            found.append(unclosed)
            start = again
            continue
        found.append(_read(text[start:end], how.body))
        start = text.find(how.opening, end + len(how.closing))
    return found


def _read(body: str, kind: str) -> Call | Malformed:
    if len(body) > MAX_BODY_CHARACTERS:
        return Malformed(f"the call is longer than {MAX_BODY_CHARACTERS} characters")
    if kind == "argument":
        return Call("", body)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "") or "nested too deeply"
        return Malformed(f"the call is not valid JSON ({reason})")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed('a call must be a JSON object such as {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Malformed("the arguments of a call must be a JSON object")
    return Call(value["name"], arguments)
