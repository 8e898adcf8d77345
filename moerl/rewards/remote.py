"""The verdict of a service over HTTP. What fails is an answer without a verdict and counted, never 0.

    POST url  {"prompt_id", "dataset", "prompt", "text", "answer", "metadata"}     ->     {"reward": 0.5}

`prompt` is the prompt's text (metadata `text`), `metadata` the columns of `send`. Other keys of the answer are ignored.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field, ValidationError

from moerl.errors import ConfigError
from moerl.metrics import Metrics, Sum
from moerl.rewards import rewards
from moerl.rewards.base import UnscoredError
from moerl.rewards.http import HttpConfig, JsonService, Retries
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt


@dataclass
class RemoteConfig(HttpConfig):
    """Which service."""

    send: list[str] = field(default_factory=list)
    """Columns of the prompt file to send along as `metadata`."""
    minimum: float = -1e6
    maximum: float = 1e6
    """A reward outside is no verdict."""


class _Answer(BaseModel):
    """What a service must say."""

    reward: Annotated[float, Field(strict=True, allow_inf_nan=False)]


@rewards.register("remote", RemoteConfig)
class Remote:
    """One request for each answer."""

    def __init__(self, config: RemoteConfig, pool: SandboxPool) -> None:
        """`pool` is not used. Raises `ConfigError`."""
        if not config.minimum < config.maximum:
            raise ConfigError(f"reward remote: minimum={config.minimum} must be below maximum={config.maximum}")
        self._config = config
        self._service = JsonService(config, "remote")
        self._retries = Retries()

    async def score(self, prompt: Prompt, text: str) -> float:
        """The service's number; `UnscoredError` without one."""
        body = {
            "prompt_id": prompt.prompt_id,
            "dataset": prompt.dataset,
            "prompt": prompt.metadata.get("text"),
            "text": text,
            "answer": prompt.answer,
            "metadata": {name: prompt.metadata[name] for name in self._config.send},
        }
        found = await self._service.ask(body, self._retries)
        try:
            value = _Answer.model_validate(found).reward
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise UnscoredError("exception", f"the answer has no `reward` that is a finite number ({first})") from None
        if not self._config.minimum <= value <= self._config.maximum:
            bounds = f"{self._config.minimum:g} to {self._config.maximum:g}"
            raise UnscoredError("exception", f"the reward {value:g} is outside of {bounds}")
        return value

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """The columns of `send` must be there, and be what JSON can say."""
        return [self._lacks(prompt) for prompt in prompts]

    def take_metrics(self) -> Metrics:
        """`retries` since the last call."""
        return {"retries": Sum(float(self._retries.take()))}

    def apart(self) -> Remote:
        """With a count of its own, over the same connections."""
        other = copy.copy(self)
        other._retries = Retries()
        return other

    def close(self) -> None:
        """Close the connections."""
        self._service.close()

    def _lacks(self, prompt: Prompt) -> str | None:
        lacking = [name for name in self._config.send if name not in prompt.metadata]
        if lacking:
            return f"has no column {', '.join(lacking)}, which the reward remote is told to send"
        for name in self._config.send:
            value = prompt.metadata[name]
            if (why := _no_json(value)) is not None:
                return (
                    f"column {name} holds a {type(value).__name__}, which the reward remote is told to send but JSON "
                    f"cannot say ({why}); write it as text, numbers, lists or objects of them in the file, or leave it "
                    "out of `send`"
                )
        return None


def _no_json(value: object) -> str | None:
    """Why `value` cannot be sent; None where it can."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None
