"""Several turns with tools: the policy calls, the answers are put after its tokens, it goes on.

The loop of one episode, until a turn calls no tool:

    sample a turn -> read its calls from the text -> ask the tools -> encode the new text alone -> append it, in no loss

What was sampled is never encoded again. The new text is what the policy's chat template writes after an assistant that
tools answered (`results: template`), or the answers between markers, within the same turn (`results: text`).
`rollout.max_new_tokens` bounds everything after the prompt: sampled tokens and answers together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from moerl.envs import Decode, environments
from moerl.envs.calls import Call, CallFormat, Malformed, parse_calls
from moerl.envs.episode import Episode
from moerl.envs.given import Answer, Dialogue, Sandbox
from moerl.envs.tools import Tool, ToolError, ToolLateError, tools
from moerl.envs.turns import play_turn
from moerl.errors import ConfigError, RolloutError
from moerl.protocols import RolloutEngine
from moerl.registry import Plugin
from moerl.types import FinishReason, Prompt, SamplingParams, Trajectory

WHERE = "rollout.environment"
RESULTS = ("template", "text")
SCORED = ("last", "all")
COUNTS = ("calls", "malformed", "unknown", "refused", "errors", "timeouts", "result_tokens", "cut_results")
"""What is counted of each episode; its mean is `rollout/tool_<word>`."""
FEWEST_CHARACTERS = 16


@dataclass(frozen=True)
class ToolUseConfig:
    """Arguments of `rollout.environment: {name: tool_use}`."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """Nodes such as `{name: calculator}`, or `{name: "my_package.tools:weather"}`."""
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    body: str = "json"
    """`json`: `{"name": ..., "arguments": {...}}`; `argument`: the whole body is the one argument of the one tool."""
    calls_after: str = ""
    """Calls are read only after its last occurrence, where the text holds it, such as `</think>`."""
    results: str = "template"
    """`template`: as messages of the role `tool` in the policy's chat template, and a new turn of the assistant;
    `text`: between `result_open` and `result_close` right after the call, whose closing marker ends the sampling."""
    result_open: str = ""
    result_close: str = ""
    error_text: str = "error: {error}"
    """What the policy reads in place of an answer; {error} is the reason."""
    announce: bool = True
    """With `results: template`: hand the tools' schemas to the chat template."""
    max_turns: int = 8
    """Turns of the policy."""
    max_turn_tokens: int | None = None
    """Sampled tokens of one turn; null: what the episode has left."""
    max_calls_per_turn: int = 8
    """Further ones are answered with an error."""
    max_result_characters: int = 4096
    """Longer answers are cut, and say so."""
    tool_timeout_seconds: float = 10.0
    """Of one call; a late one is answered with an error. In the sandbox it counts from when a process starts on the
    call: how long it stood in the queue is not the policy's doing."""
    scored: str = "last"
    """Text that the rewards see: `last`, the turn that called no tool; `all`, what was sampled in all turns."""
    max_aborts: int = 8
    """As in single_turn, for each turn."""

    @property
    def format(self) -> CallFormat:
        """How calls are written."""
        return CallFormat(self.call_open, self.call_close, self.body, self.calls_after)


def check(cfg: ToolUseConfig) -> tuple[str, ...]:
    """The strings that the tokenizer must be able to write.

    Raises:
        ConfigError: a number out of range, a word that is none of those allowed, no tool, or one that does not fit.
    """
    numbers: dict[str, float | None] = {
        "max_turns": cfg.max_turns,
        "max_turn_tokens": cfg.max_turn_tokens,
        "max_calls_per_turn": cfg.max_calls_per_turn,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"{WHERE}.{name}={value} must be 1 or more")
    if cfg.max_result_characters < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{WHERE}.max_result_characters={cfg.max_result_characters} must be {FEWEST_CHARACTERS} or more"
        )
    if not cfg.tool_timeout_seconds > 0:
        raise ConfigError(f"{WHERE}.tool_timeout_seconds={cfg.tool_timeout_seconds} must be above 0")
    for name, word, allowed in (("results", cfg.results, RESULTS), ("scored", cfg.scored, SCORED)):
        if word not in allowed:
            raise ConfigError(f"{WHERE}.{name} is {word!r}; allowed: {', '.join(allowed)}")
    cfg.format.check(WHERE)
    plugins = _plugins(cfg)
    if cfg.body == "argument" and (len(plugins) != 1 or len(_fields(plugins[0][0])) != 1):
        raise ConfigError(
            f"{WHERE}.body=argument needs exactly one tool with exactly one argument, and the tools are "
            f"{', '.join(plugin.name for plugin, _ in plugins)}; use body=json"
        )
    written = [cfg.call_open, cfg.call_close]
    if cfg.results == "text":
        written += [text for text in (cfg.result_open, cfg.result_close) if text.strip()]
        written += [] if "{error}" in cfg.error_text else [cfg.error_text]
    return tuple(written)


def schemas(cfg: ToolUseConfig) -> list[dict[str, Any]]:
    """The tools as chat templates take them; [] where they are not announced."""
    if cfg.results != "template" or not cfg.announce:
        return []
    return [
        {
            "type": "function",
            "function": {
                "name": plugin.name,
                "description": plugin.traits["about"],
                "parameters": plugin.traits["arguments"].model_json_schema(),
            },
        }
        for plugin, _ in _plugins(cfg)
    ]


def _plugins(cfg: ToolUseConfig) -> list[tuple[Plugin[Any], Any]]:
    if not cfg.tools:
        raise ConfigError(f"{WHERE}.tools is empty; name at least one, such as [{{name: calculator}}]")
    found = [tools.resolve(node, where=f"{WHERE}.tools[{i}]") for i, node in enumerate(cfg.tools)]
    names = [plugin.name for plugin, _ in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"{WHERE}.tools names {', '.join(names)}: each tool once")
    return found


def _fields(plugin: Plugin[Any]) -> list[str]:
    return list(plugin.traits["arguments"].model_fields)


_AWKWARD = 'a "quoted" \\ path\nand a line'
"""What an answer may hold and a template must write."""


@dataclass(frozen=True, slots=True)
class _Served:
    """One tool that is there to be called."""

    arguments: Any
    tool: Tool
    keeps_time: bool = False
    """Whether it works in the sandbox, which keeps the time limit for it."""


class _TimedSandbox:
    """The sandbox with the time limit of a tool's call."""

    def __init__(self, sandbox: Sandbox, limit_seconds: float) -> None:
        self._sandbox = sandbox
        self._limit_seconds = limit_seconds

    async def run(self, function: str, kwargs: dict[str, Any], *, timeout_seconds: float | None = None) -> Answer:
        """Within the limit, or less where the tool says so."""
        limit = min(self._limit_seconds, timeout_seconds or self._limit_seconds)
        return await self._sandbox.run(function, kwargs, timeout_seconds=limit)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A call that no tool is asked."""

    kind: str
    reason: str


@environments.register(
    "tool_use",
    ToolUseConfig,
    injects=("decode", "max_context_tokens", "dialogue", "sandbox"),
    check=check,
    schemas=schemas,
    multi_turn=True,
)
class ToolUse:
    """Plays episodes with tools. One object serves all episodes at once."""

    def __init__(
        self, cfg: ToolUseConfig, *, decode: Decode, max_context_tokens: int, dialogue: Dialogue, sandbox: Sandbox
    ) -> None:
        """Raises `ConfigError` as `check`, and `DataError` where the chat template cannot write a tool's answer."""
        check(cfg)
        self._cfg = cfg
        self._decode = decode
        self._max_context_tokens = max_context_tokens
        self._dialogue = dialogue
        given: dict[str, Any] = {"sandbox": _TimedSandbox(sandbox, cfg.tool_timeout_seconds)}
        self._tools: dict[str, _Served] = {}
        for plugin, tool_cfg in _plugins(cfg):
            injected = {name: given[name] for name in plugin.traits.get("injects", ())}
            tool = plugin.target(tool_cfg, **injected)
            self._tools[plugin.name] = _Served(plugin.traits["arguments"], tool, keeps_time="sandbox" in injected)
        if cfg.results == "template":
            dialogue.after_calls([_AWKWARD])

    async def run(self, prompt: Prompt, engine: RolloutEngine, params: SamplingParams, request_id: str) -> Trajectory:
        """Play `prompt` once; without room for a single token the status is `too_long` and nothing is asked.

        The finish reason is that of the turn that called no tool; `length` where a budget ended the episode: tokens,
        turns, or no room for the answers (`rollout/tool_limit_*`). Answers that end it are not appended.

        Raises:
            RolloutError: the engine broke its protocol, the prompt is empty, or a tool failed by its own fault.
            DataError: the tokenizer has no tokens for an answer.
        """
        if len(prompt.token_ids) == 0:
            raise RolloutError(f"prompt {prompt.prompt_id} has no tokens; check its row in {prompt.dataset}")
        episode = Episode(prompt.token_ids, temperature=params.temperature, wants_routes=params.return_routes)
        room = min(params.max_new_tokens, self._max_context_tokens - len(prompt.token_ids))
        if room < 1:
            reason = f"prompt of {len(prompt.token_ids)} tokens fills the context of {self._max_context_tokens}"
            return episode.finish(text="", finish_reason="length", status="too_long", error=reason)
        return await self._play(episode, engine, self._asked(params), request_id, room)

    def _asked(self, params: SamplingParams) -> SamplingParams:
        """Where answers follow the call within the turn, its closing marker ends the sampling."""
        if self._cfg.results == "template":
            return params
        return replace(params, stop_strings=tuple(dict.fromkeys([*params.stop_strings, self._cfg.call_close])))

    async def _play(
        self, episode: Episode, engine: RolloutEngine, params: SamplingParams, request_id: str, room: int
    ) -> Trajectory:
        cfg, counts, texts = self._cfg, Counter[str](), list[str]()
        limit = ""
        while True:
            left = room - episode.num_added
            budget = left if cfg.max_turn_tokens is None else min(left, cfg.max_turn_tokens)
            turn = await play_turn(episode, engine, params, request_id, budget=budget, max_aborts=cfg.max_aborts)
            texts.append(self._decode(turn.without_stop(params.stop_token_ids)))
            calls = parse_calls(texts[-1], cfg.format)
            if turn.finish_reason == "abort":
                return self._finish(episode, texts, counts, "abort", aborts=turn.aborts, name=request_id)
            if turn.finish_reason == "length":
                counts["malformed"] += sum(isinstance(call, Malformed) for call in calls)
                limit = "tokens"
            elif calls and cfg.results == "text" and turn.token_ids[-1] in self._dialogue.stop_token_ids:
                counts["malformed"] += len(calls)  # the answer is over: nothing may follow its end token
                calls = []
            elif calls and len(texts) == cfg.max_turns:
                limit = "turns"
            if not calls or limit:
                break
            results = await self._answers(calls, counts)
            context = self._context(results, int(turn.token_ids[-1]))
            counts["result_tokens"] += len(context)
            if len(context) >= room - episode.num_added:
                limit = "context"
                break
            episode.add_context(context)
        return self._finish(episode, texts, counts, "length" if limit else turn.finish_reason, limit=limit)

    def _finish(
        self,
        episode: Episode,
        texts: Sequence[str],
        counts: Mapping[str, int],
        reason: FinishReason,
        *,
        limit: str = "",
        aborts: int = 0,
        name: str = "",
    ) -> Trajectory:
        metrics = {f"tool_{word}": float(counts.get(word, 0)) for word in COUNTS}
        metrics["tool_turns"] = float(len(texts))
        metrics |= {f"tool_limit_{word}": float(limit == word) for word in ("tokens", "turns", "context")}
        text = texts[-1] if self._cfg.scored == "last" else "\n".join(texts)
        if reason == "abort":
            error = f"request {name} was aborted {aborts} times"
            return episode.finish(text=text, finish_reason=reason, status="aborted", error=error, metrics=metrics)
        return episode.finish(text=text, finish_reason=reason, metrics=metrics)

    async def _answers(self, calls: Sequence[Call | Malformed], counts: Counter[str]) -> list[str]:
        """One for each call, in their order; the calls of a turn run at once."""
        served = [self._answer(call, i, counts) for i, call in enumerate(calls)]
        return list(await asyncio.gather(*served))

    async def _answer(self, call: Call | Malformed, index: int, counts: Counter[str]) -> str:
        counts["calls"] += 1
        found = self._readable(call, index)
        if isinstance(found, _Refusal):
            counts[found.kind] += 1
            return self._error(found.reason, counts)
        name, served, arguments = found
        try:
            async with asyncio.timeout(None if served.keeps_time else self._cfg.tool_timeout_seconds) as deadline:
                answer = await served.tool.call(arguments)
        except ToolError as error:
            counts["timeouts" if isinstance(error, ToolLateError) else "errors"] += 1
            return self._error(str(error), counts)
        except TimeoutError:
            if not deadline.expired():
                raise
            counts["timeouts"] += 1
            return self._error(f"{name} gave no answer within {self._cfg.tool_timeout_seconds:g} s", counts)
        return self._bounded(answer, counts)

    def _readable(self, call: Call | Malformed, index: int) -> _Refusal | tuple[str, _Served, Any]:
        """(name, tool, arguments) of a call that can be made."""
        if isinstance(call, Malformed):
            return _Refusal("malformed", call.reason)
        if index >= self._cfg.max_calls_per_turn:
            return _Refusal("refused", f"at most {self._cfg.max_calls_per_turn} calls in one turn")
        name = call.name or next(iter(self._tools))
        if name not in self._tools:
            return _Refusal("unknown", f"no tool is called {name[:60]!r}; there are {', '.join(self._tools)}")
        served, written = self._tools[name], call.arguments
        values = {next(iter(served.arguments.model_fields)): written} if isinstance(written, str) else dict(written)
        try:
            return name, served, served.arguments.model_validate(values)
        except ValidationError as error:
            return _Refusal("refused", _in_words(error, name))

    def _error(self, reason: str, counts: Counter[str]) -> str:
        return self._bounded(self._cfg.error_text.replace("{error}", reason), counts)

    def _bounded(self, answer: str, counts: Counter[str]) -> str:
        """A stranger's text: not too long, and nothing in it that the tokenizer reads as the end of a turn."""
        longest = self._cfg.max_result_characters
        if len(answer) > longest:
            counts["cut_results"] += 1
            answer = f"{answer[:longest]} [cut at {longest} of {len(answer)} characters]"
        return self._dialogue.without_added_tokens(answer)

    def _context(self, results: Sequence[str], last_token: int) -> np.ndarray:
        """Tokens [s] of the text between two turns; an end token that the policy sampled is not written again."""
        if self._cfg.results == "text":
            text = "".join(f"{self._cfg.result_open}{result}{self._cfg.result_close}" for result in results)
            return self._dialogue.encode_text(text) if text else np.zeros(0, dtype=np.int32)
        text = self._dialogue.after_calls(results)
        if last_token in self._dialogue.stop_token_ids:
            text = text.removeprefix(self._dialogue.token_text(last_token))
        return self._dialogue.encode_text(text)


def _in_words(error: ValidationError, name: str) -> str:
    """The first thing that is wrong with a call's arguments."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{name}: {place}: {first['msg']}{more}" if place else f"{name}: {first['msg']}{more}"
