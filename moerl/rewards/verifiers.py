"""What the rewards of a verifiers task give an answer; for prompts of the source `verifiers`, which says what is
covered.

A trace of the task's messages and the answer's text is what the task scores. Its functions are the taskset's own code
and run in this process, on its event loop: install only tasksets that you trust.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moerl.errors import ConfigError
from moerl.metrics import Mean, Metrics, merge_into
from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, UnscoredError
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt


@dataclass
class VerifiersRewardConfig(RewardConfig):
    """Whether it is trusted, and how long it may take."""

    in_process: bool = False
    """Must be true: the taskset's functions read a model's text in this process, outside of the sandbox, because they
    may hold judges, clients and data of their own. Say so only for a taskset whose functions run nothing of it."""
    timeout_seconds: float = 60.0
    """Of the task's functions and judges together, where they wait; one that computes cannot be interrupted."""


@rewards.register("verifiers", VerifiersRewardConfig)
class Verifiers:
    """The weighted sum of the task's rewards, as the taskset weighs them."""

    def __init__(self, config: VerifiersRewardConfig, pool: SandboxPool) -> None:
        """`pool` is not used. Raises `ConfigError` where `in_process` was not agreed to."""
        if not config.in_process:
            raise ConfigError(
                "reward verifiers: the functions of a taskset read a model's text in this process and not in the "
                "sandbox; if you trust the taskset to run nothing of it, say so: {name: verifiers, in_process: true}"
            )
        if not config.timeout_seconds > 0:
            raise ConfigError(f"reward verifiers: timeout_seconds={config.timeout_seconds} must be above 0")
        self._config = config
        self._metrics: Metrics = {}

    async def score(self, prompt: Prompt, text: str) -> float:
        """The sum. `UnscoredError` where a function of the task fails, is late, or gives no number."""
        if problem := _problem(prompt):
            raise UnscoredError("exception", problem)
        task = prompt.metadata["verifiers_task"]
        trace = _trace(task, text)
        try:
            async with asyncio.timeout(self._config.timeout_seconds) as deadline:
                await task.score(trace)
        except Exception as error:  # a taskset's functions may raise anything; it is no verdict
            if deadline.expired() and isinstance(error, TimeoutError):
                raise UnscoredError("timeout", f"no verdict within {self._config.timeout_seconds:g} s") from None
            raise UnscoredError("exception", f"{type(error).__name__}: {str(error)[:200]}") from error
        lacking = [name for name, reward in trace.rewards.items() if reward is None]
        if lacking or not trace.rewards or not math.isfinite(trace.reward):
            names = ", ".join(lacking) or "the sum of its rewards"
            raise UnscoredError("exception", f"the task gave no number for {names}")
        for name, reward in trace.rewards.items():
            merge_into(self._metrics, {name: Mean(reward.score)})
        for name, value in trace.metrics.items():
            if value is not None:
                merge_into(self._metrics, {name: Mean(float(value))})
        return float(trace.reward)

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Prompts must come from the `verifiers` source."""
        return [_problem(prompt) for prompt in prompts]

    def take_metrics(self) -> Metrics:
        """Means of the task's rewards and metrics, by their names, since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def apart(self) -> Verifiers:
        """With means of its own."""
        other = copy.copy(self)
        other._metrics = {}
        return other


def _problem(prompt: Prompt) -> str | None:
    if "verifiers_task" in prompt.metadata:
        return None
    return "is of no taskset; the reward verifiers is for prompts of the source verifiers"


def _trace(task: Any, text: str) -> Any:
    """What verifiers would have recorded of one turn."""
    import verifiers.v1 as vf

    data = task.data
    said = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    said += [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    nodes = [vf.MessageNode(parent=i - 1 if i else None, message=message) for i, message in enumerate(said)]
    answer = vf.AssistantMessage(content=text)
    nodes.append(vf.MessageNode(parent=len(nodes) - 1, message=answer, sampled=True))
    seen = vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)
    agent = vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))
    return vf.Trace(task=seen, agent=agent, nodes=nodes, is_completed=True, ok=True, stop_condition="agent_completed")
