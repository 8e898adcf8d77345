"""What every verifier is: a config with a weight, and a class that scores one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from moerl.errors import ConfigError, MoerlError
from moerl.metrics import Metrics
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt


@dataclass
class RewardConfig:
    """What every reward node has."""

    weight: float = 1.0
    """Factor of this component in the sum."""
    datasets: list[str] | None = None
    """Data sets it applies to; None is all."""
    id: str | None = None
    """Name of the component; None is the plugin's name. Needed where one plugin is used twice."""


class UnscoredError(MoerlError, RuntimeError):
    """One answer that no verdict could be had on; it marks its trajectory as an error and is counted by `kind`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Reward(Protocol):
    """A registered verifier class; its constructor is `(config, pool)`."""

    async def score(self, prompt: Prompt, text: str) -> float:
        """Value of the answer `text`; raises `UnscoredError` where there is no verdict, in place of any number."""
        ...

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """For each prompt what is wrong with its gold answer, or None."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A reward that measures more than its value."""

    def take_metrics(self) -> Metrics:
        """Since the last call, by short names."""
        ...


@runtime_checkable
class Separable(Protocol):
    """A reward that measures, and can do so for two readers."""

    def apart(self) -> Reward:
        """The same reward with measurements of its own; all else, such as connections, is shared and closed by this
        one.
        """
        ...


@runtime_checkable
class Closable(Protocol):
    """A reward that has something open."""

    def close(self) -> None:
        """Close it. May be called twice."""
        ...


async def judge(pool: SandboxPool, function: str, **kwargs: Any) -> Any:
    """The value of one sandboxed call. Raises `UnscoredError` where it timed out, crashed or raised."""
    verdict = await pool.run(function, kwargs)
    if verdict.error:
        raise UnscoredError(verdict.error, verdict.text)
    return verdict.value


def need_answers(prompts: Sequence[Prompt]) -> list[str | None]:
    """The check of verifiers that only need a gold answer to be there."""
    return [None if p.answer is not None and p.answer.strip() else "has no gold answer" for p in prompts]


def check_choice(value: str, allowed: Sequence[str], *, where: str) -> None:
    """Raises `ConfigError` where a word is none of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{where} is {value!r}; allowed: {', '.join(allowed)}")
