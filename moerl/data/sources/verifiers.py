"""Tasks of a taskset of the PyPI package `verifiers` (0.4, `verifiers.v1`); the reward `verifiers` scores them.

Covered: tasksets whose tasks bring a prompt (text or messages, a system prompt too) and are scored offline, by
`@reward` and `@metric` functions of task and trace, or by plugged judges. The policy answers through moerl's own
engine and environment, so the tokens that are trained on are the ones that were sampled. Not covered, and refused here:
tasks with tool servers, a container, a `setup` or `finalize`, hooks that need a runtime, a user who speaks first,
pictures. Harnesses, runtimes and the interception server of verifiers are not used.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from moerl.data.rows import Row
from moerl.data.sources import prompt_sources
from moerl.errors import ConfigError, DataError


@dataclass
class VerifiersConfig:
    """Which taskset."""

    taskset: str = MISSING
    """Its id: the name of the installed module that exports it."""
    size: int | None = None
    """Take the first so many tasks; an infinite taskset needs it."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Fields of the taskset's own configuration."""


@prompt_sources.register("verifiers", VerifiersConfig)
def read_tasks(config: VerifiersConfig) -> list[Row]:
    """The taskset's tasks in its order; `metadata["verifiers_task"]` is the task itself.

    Raises:
        ConfigError: the package or the taskset is missing, or it needs what is not covered.
        DataError: a task without a prompt that can be asked.
    """
    taskset = _load(config)
    if config.size is None and not taskset.bounded:
        raise ConfigError(f"verifiers taskset {config.taskset!r} never ends; set size")
    rows = []
    for index, task in enumerate(itertools.islice(taskset, config.size)):
        where = f"verifiers:{config.taskset}#{index}"
        if lacking := _not_covered(task):
            raise ConfigError(
                f"{where}: the task has {', '.join(lacking)}, which moerl does not cover (docs/environments.md); "
                "choose a taskset that is scored from its answer alone"
            )
        answer = getattr(task.data, "answer", None)
        gold = None if answer is None else str(answer)
        rows.append(Row(index, _prompt(task, where), gold, where, metadata={"verifiers_task": task}))
    return rows


def _load(config: VerifiersConfig) -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(
            f"prompt source verifiers needs the package: pip install 'moerl[verifiers]' ({error})"
        ) from error
    if config.size is not None and config.size < 1:
        raise ConfigError(f"verifiers taskset {config.taskset!r}: size must be at least 1, is {config.size}")
    try:
        kind = vf.taskset_config_type(config.taskset)
        return vf.load_taskset(kind.model_validate({"id": config.taskset, **config.arguments}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers taskset {config.taskset!r} cannot be loaded ({error})") from error


def _not_covered(task: Any) -> list[str]:
    """What the task needs beside an answer."""
    from verifiers.v1 import Task

    found = []
    if type(task).toolsets(task.config):
        found.append("tool servers")
    if task.NEEDS_CONTAINER or task.data.image:
        found.append("a container")
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(Task, hook):
            found.append(f"a {hook}")
    for hook in (*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())):
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            found.append(f"{hook.__name__} with a runtime")
    return found


def _prompt(task: Any, where: str) -> str | list[dict[str, str]]:
    prompt, system = task.data.prompt, task.data.system_prompt
    if isinstance(prompt, str) and prompt.strip() and not system:
        return prompt
    messages = [{"role": "system", "content": system}] if system else []
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    for message in said:
        one = message if isinstance(message, dict) else {"role": message.role, "content": message.content}
        if not isinstance(one["content"], str):
            raise DataError(f"{where}: a message of the {one['role']} is not text; moerl trains on text alone")
        messages.append(one)
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise DataError(f"{where}: the prompt does not end with a message of the user; moerl cannot speak for one")
    return messages
