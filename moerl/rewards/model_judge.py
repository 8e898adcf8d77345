r"""A language model's verdict: another engine, asked over HTTP with a prompt of your own.

`api: chat` is an OpenAI-compatible `/v1/chat/completions`, `api: sglang` SGLang's `/generate`. The template is a text
file with {question}, {answer} and {gold}; what stands in their place is never read as a placeholder itself. The verdict
is the first group of the last match of `verdict` in the judge's text, a number, or a word of `words`. Several `votes`
are averaged. Where more than `max_unreadable` of them cannot be read, the answer has no verdict.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.errors import ConfigError
from moerl.metrics import Metrics, Sum
from moerl.rewards import rewards
from moerl.rewards.base import UnscoredError, check_choice, judge
from moerl.rewards.http import HttpConfig, JsonService, Retries
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt

APIS = ("chat", "sglang")
_CUT_OFF = ("length", "abort", "content_filter")
"""Why a judge stopped before it had said what it meant to."""
_PLACES = re.compile(r"\{(question|answer|gold)\}")


@dataclass
class ModelJudgeConfig(HttpConfig):
    """Which judge, and how it is asked."""

    api: str = "chat"
    model: str = ""
    """Name that the service knows the judge by; `chat` only."""
    template: str = ""
    """Path of the prompt's text file."""
    verdict: str = r"(?i)score:\s*(-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))(?!\.?[0-9])"
    """Regular expression with a group."""
    words: dict[str, float] = field(default_factory=dict)
    """What words are worth, such as `{yes: 1, no: 0}`; case aside. Empty: the group is a number."""
    minimum: float = 0.0
    maximum: float = 1.0
    """Verdicts are mapped from this range to 0..1; one outside of it cannot be read."""
    votes: int = 1
    max_unreadable: int = 0
    """So many of the votes may be without a readable verdict; the others are averaged."""
    max_new_tokens: int = 512
    temperature: float = 0.0
    cache_entries: int = 10_000
    """Verdicts kept by question, answer and gold; 0 asks every time."""


@rewards.register("model_judge", ModelJudgeConfig)
class ModelJudge:
    """Values from 0 to 1."""

    def __init__(self, config: ModelJudgeConfig, pool: SandboxPool) -> None:
        """The judge's text is read in `pool`: it may quote the answer, and a pattern can hang on hostile text.

        Raises:
            ConfigError: what cannot be, a template that is not there, or one that does not show the answer.
        """
        check_choice(config.api, APIS, where="reward model_judge: api")
        _check_pattern(config.verdict)
        _check_numbers(config)
        self._config = config
        self._pool = pool
        self._template = _template(config.template)
        self._words = {word.casefold(): value for word, value in config.words.items()}
        self._service = JsonService(config, "model_judge")
        self._cache: OrderedDict[str, float] = OrderedDict()
        self._counts = {"unreadable": 0, "cached": 0}
        self._retries = Retries()

    async def score(self, prompt: Prompt, text: str) -> float:
        """Mean of the votes; `UnscoredError` where a request failed or too many votes cannot be read."""
        question = str(prompt.metadata.get("text") or "")
        asked = self._asked(question, text, prompt.answer or "")
        key = hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()
        if key in self._cache:
            self._counts["cached"] += 1
            self._cache.move_to_end(key)
            return self._cache[key]
        said = await asyncio.gather(*(self._vote(asked, vote) for vote in range(self._config.votes)))
        values = await asyncio.gather(*(self._read(one) for one in said if one is not None))
        read = [value for value in values if value is not None]
        unreadable = len(said) - len(read)
        self._counts["unreadable"] += unreadable
        if unreadable > self._config.max_unreadable or not read:
            raise UnscoredError(
                "exception", f"{unreadable} of {len(said)} votes have no verdict that {self._config.verdict!r} reads"
            )
        value = math.fsum(read) / len(read)
        if self._config.cache_entries:
            self._cache[key] = value
            while len(self._cache) > self._config.cache_entries:
                self._cache.popitem(last=False)
        return value

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Where the template shows the gold answer, one must be there."""
        if "{gold}" not in self._template:
            return [None] * len(prompts)
        return [
            None if prompt.answer else "has no gold answer, and the judge's template shows it" for prompt in prompts
        ]

    def take_metrics(self) -> Metrics:
        """`unreadable` votes, `cached` answers and `retries` since the last call."""
        counts, self._counts = self._counts, {"unreadable": 0, "cached": 0}
        counts["retries"] = self._retries.take()
        return {name: Sum(float(count)) for name, count in counts.items()}

    def apart(self) -> ModelJudge:
        """With counts of its own; verdicts that are known and connections are shared."""
        other = copy.copy(self)
        other._counts, other._retries = {"unreadable": 0, "cached": 0}, Retries()
        return other

    def close(self) -> None:
        """Close the connections."""
        self._service.close()

    def _asked(self, question: str, answer: str, gold: str) -> str:
        parts = {"question": question, "answer": answer, "gold": gold}
        return _PLACES.sub(lambda place: parts[place[1]], self._template)

    async def _vote(self, asked: str, vote: int) -> str | None:
        """The judge's text; None where it was cut off, since what stands last in it is not its verdict."""
        config = self._config
        if config.api == "chat":
            body: dict[str, Any] = {
                "model": config.model,
                "messages": [{"role": "user", "content": asked}],
                "max_tokens": config.max_new_tokens,
                "temperature": config.temperature,
                "seed": vote,
            }
            answer = await self._service.ask(body, self._retries)
            said = _said(answer, ("choices", 0, "message", "content"))
            return None if answer["choices"][0].get("finish_reason") in _CUT_OFF else said
        sampling = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature}
        body = {"text": asked, "sampling_params": sampling}
        answer = await self._service.ask(body, self._retries)
        said, meta = _said(answer, ("text",)), answer.get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        return None if isinstance(reason, dict) and reason.get("type") in _CUT_OFF else said

    async def _read(self, said: str) -> float | None:
        """0..1, or None."""
        pattern = self._config.verdict
        found = await judge(self._pool, "moerl.rewards.judges.text:last_group", text=said, pattern=pattern)
        if found is None:
            return None
        try:
            value = self._words[found.casefold()] if self._words else float(found)
        except (KeyError, ValueError):
            return None
        low, high = self._config.minimum, self._config.maximum
        return (value - low) / (high - low) if low <= value <= high else None


def _said(answer: Mapping[str, Any], path: Sequence[str | int]) -> str:
    value: Any = answer
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        value = None
    if not isinstance(value, str):
        raise UnscoredError("exception", f"the judge's answer has no text at {json.dumps(list(path))}")
    return value


def _check_pattern(pattern: str) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"reward model_judge: verdict {pattern!r} is no regular expression ({error})") from error
    if not compiled.groups:
        raise ConfigError(f"reward model_judge: verdict {pattern!r} has no group; put (...) around the verdict")


def _check_numbers(config: ModelJudgeConfig) -> None:
    low, high = config.minimum, config.maximum
    if not (low < high and math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"reward model_judge: minimum={low} must be below maximum={high}, both finite")
    for word, value in config.words.items():
        if not low <= value <= high:
            raise ConfigError(
                f"reward model_judge: words has {word}: {value}, which is not between minimum={low} and maximum={high}"
            )
    if config.votes < 1 or not 0 <= config.max_unreadable < config.votes:
        raise ConfigError(
            f"reward model_judge: votes={config.votes} must be 1 or more, and max_unreadable={config.max_unreadable} "
            "below it"
        )
    if config.max_new_tokens < 1 or config.temperature < 0 or config.cache_entries < 0:
        raise ConfigError(
            f"reward model_judge: max_new_tokens={config.max_new_tokens} must be 1 or more, "
            f"temperature={config.temperature} and cache_entries={config.cache_entries} 0 or more"
        )
    if config.votes > 1 and config.temperature == 0:
        raise ConfigError(f"reward model_judge: votes={config.votes} at temperature=0 are all the same; set it above 0")


def _template(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"reward model_judge: template={path!r} must be a text file ({type(error).__name__})"
        ) from error
    if "{answer}" not in text:
        raise ConfigError(f"reward model_judge: {path} must hold {{answer}}, where the text to judge is written")
    return text
