"""Prompts to groups of scored episodes: all at once, each under its own deadline; a failure is one episode's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from moerl.errors import ConfigError
from moerl.protocols import Environment, RolloutEngine, Scorer, Span, Stalling
from moerl.rollout.deadline import Deadline
from moerl.rollout.engine import request_id, sample_seed
from moerl.rollout.loop_thread import LoopRunner
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CONCURRENCY = 4096
"""Episodes at once, where nothing else bounds them."""

Progress = Callable[[int, int], None]
"""Told (finished episodes, all episodes) after each one."""


class GroupCollector(Protocol):
    """What a buffer asks."""

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        group_size: int,
        params: SamplingParams,
        first_indices: Sequence[int] | None = None,
    ) -> list[RolloutGroup]:
        """One group for each prompt, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class _Played:
    trajectory: Trajectory
    start: float
    end: float


@dataclass(frozen=True)
class CollectorHooks:
    """What a collector tells, and where it runs; all optional."""

    on_progress: Progress | None = None
    """Called on the event loop; must return at once."""
    on_span: Span | None = None
    """Told of every group of a training step that `collect` played."""
    runner: LoopRunner | None = None
    """None makes an event loop that runs in the thread that calls."""
    gate: asyncio.Semaphore | None = None
    """Held by every episode while it is played; shared by collectors of one event loop whose engine is the same. None
    makes one of `max_concurrency`."""


class Collector:
    """Owns the event loop that episodes run on. Results are in the order of the prompts, whatever finished first."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        environments: Mapping[str, Environment],
        scorer: Scorer,
        run_seed: int,
        timeout_seconds: float,
        max_concurrency: int = MAX_CONCURRENCY,
        hooks: CollectorHooks | None = None,
    ) -> None:
        """Wire it.

        Args:
            engine: answers.
            environments: by the name that `Prompt.env` says.
            scorer: asked as each episode finishes, while others still run.
            run_seed: part of every sample's seed.
            timeout_seconds: of one episode, scoring not included, counted from when its turn has come; times in which
                the engine can serve nobody do not count.
            max_concurrency: episodes at once; below the size of a step, the engine's batches are smaller too, and
                above what the engine serves at once, waiting for its turn is part of an episode's time.
            hooks: see there.
        """
        if timeout_seconds <= 0 or max_concurrency < 1:
            raise ConfigError(
                f"timeout_seconds={timeout_seconds} must be positive and max_concurrency={max_concurrency} 1 or more"
            )
        self._engine = engine
        self._environments = dict(environments)
        self._scorer = scorer
        self._run_seed = run_seed
        self._timeout_seconds = timeout_seconds
        self._hooks = hooks or CollectorHooks()
        self._runner: LoopRunner = self._hooks.runner or asyncio.Runner()
        self._gate = self._hooks.gate or asyncio.Semaphore(max_concurrency)

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        group_size: int,
        params: SamplingParams,
        first_indices: Sequence[int] | None = None,
    ) -> list[RolloutGroup]:
        """Play every prompt `group_size` times and wait for all. Ctrl-C cancels every episode and travels on.

        Args:
            prompts: one group each.
            step: part of every sample's seed.
            group_size: episodes per prompt.
            params: of every episode, but for the seed, which is made here.
            first_indices: sample index at which each prompt's group starts; None counts repeats within this call.

        Raises:
            ConfigError: a prompt asks for an environment that is not there.
        """
        for prompt in prompts:
            self._refuse_unknown(prompt)
        starts = first_indices if first_indices is not None else group_starts(Counter(), prompts, group_size)
        jobs = [(prompt, start + i) for prompt, start in zip(prompts, starts, strict=True) for i in range(group_size)]
        played = self.run(self._play_all(jobs, step, params))
        groups = []
        for i, prompt in enumerate(prompts):
            of_group = played[i * group_size : (i + 1) * group_size]
            groups.append(RolloutGroup(prompt, tuple(one.trajectory for one in of_group)))
            if self._hooks.on_span is not None and step:  # step 0 is evaluation
                start, end = min(one.start for one in of_group), max(one.end for one in of_group)
                self._hooks.on_span(prompt.prompt_id, start, end, {"step": step})
        return groups

    async def play(
        self, prompt: Prompt, index: int, *, step: int, params: SamplingParams, number: int | None = None
    ) -> Trajectory:
        """One scored episode, for who is on this event loop already.

        Args:
            prompt: what is asked.
            index: sample index, which with `step` makes the seed.
            step: part of the seed.
            params: but for the seed.
            number: stands in the request's name in place of `index`, where several steps are asked for at once.

        Raises:
            ConfigError: the prompt asks for an environment that is not there.
        """
        self._refuse_unknown(prompt)
        seeded = replace(params, seed=sample_seed(self._run_seed, step, prompt.prompt_id, index))
        name = request_id(prompt.prompt_id, index if number is None else number)
        return await self._episode(prompt, name, seeded)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run anything else that needs this loop, such as publishing weights to the same engine."""
        return self._runner.run(coroutine)

    def close(self) -> None:
        """Cancel what still runs and close the event loop."""
        self._runner.close()

    async def _play_all(self, jobs: list[tuple[Prompt, int]], step: int, params: SamplingParams) -> list[_Played]:
        finished = 0

        async def play(prompt: Prompt, index: int) -> _Played:
            nonlocal finished
            seeded = replace(params, seed=sample_seed(self._run_seed, step, prompt.prompt_id, index))
            start = time.perf_counter()
            trajectory = await self._episode(prompt, request_id(prompt.prompt_id, index), seeded)
            finished += 1
            if self._hooks.on_progress is not None:
                self._hooks.on_progress(finished, len(jobs))
            return _Played(trajectory, start, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(prompt, index)) for prompt, index in jobs]
        return [task.result() for task in tasks]

    def _stalled_seconds(self) -> float:
        return self._engine.stalled_seconds if isinstance(self._engine, Stalling) else 0.0

    def _refuse_unknown(self, prompt: Prompt) -> None:
        if prompt.env not in self._environments:
            known = ", ".join(sorted(self._environments))
            raise ConfigError(f"prompt {prompt.prompt_id}: no environment {prompt.env!r} is set up; known: {known}")

    async def _episode(self, prompt: Prompt, name: str, params: SamplingParams) -> Trajectory:
        """Play and score; whatever fails marks this one trajectory. Scoring does not hold up the next episode."""
        trajectory = _unplayed(prompt, params)
        deadline = Deadline(self._timeout_seconds, self._stalled_seconds)
        try:
            async with self._gate, deadline:
                trajectory = await self._environments[prompt.env].run(prompt, self._engine, params, name)
            if trajectory.status == "ok":
                trajectory = await self._scorer.score(prompt, trajectory)
        except Exception as error:  # noqa: BLE001  an episode's failure is data
            late = f"no end within {self._timeout_seconds:g} s (rollout.timeout_seconds)"
            reason = f"{type(error).__name__}: {late if deadline.expired() else error}"
            logger.warning("episode %s failed: %s", name, reason)
            trajectory = replace(trajectory, status="error", error=reason)
        return trajectory


def group_starts(seen: Counter[str], prompts: Sequence[Prompt], group_size: int) -> list[int]:
    """First sample index of each prompt's group, so that a prompt that comes again gets new seeds; counts in `seen`."""
    starts = []
    for prompt in prompts:
        starts.append(seen[prompt.prompt_id] * group_size)
        seen[prompt.prompt_id] += 1
    return starts


def _unplayed(prompt: Prompt, params: SamplingParams) -> Trajectory:
    length = len(prompt.token_ids)
    return Trajectory(
        token_ids=np.asarray(prompt.token_ids, dtype=np.int32),
        loss_mask=np.zeros(length, dtype=bool),
        rollout_logprobs=np.zeros(length, dtype=np.float32),
        temperature=params.temperature,
        finish_reason="abort",
        version_spans=(),
    )
