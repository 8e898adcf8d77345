"""What level-3 rooms need from one another, as protocols; `build.py` alone wires concrete classes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from torch import Tensor

from moerl.metrics import Metrics
from moerl.types import Completion, Prompt, RolloutGroup, SamplingParams, StepBatch, Trajectory, WeightBucket

GroupFilter = Callable[[RolloutGroup], str | None]
"""Looks at the task reward of one completed group; returns None to accept it, or the reason for dropping it."""


Span = Callable[[str, float, float, Mapping[str, Any]], None]
"""Told of one thing that took time: name, start and end by `time.perf_counter`, what else is to be said; any thread."""


class RolloutEngine(Protocol):
    """Generates; six methods and no more. Chat templates, rewards and retries are not its business."""

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        """Continue `token_ids` [s]; `request_id` is `<prompt_id>#<index>`.

        Optional, and promised by traits of the engine's registration (`moerl.rollout.engine`): `params.top_logprobs`.
        """
        ...

    async def pause(self) -> None:
        """Finish or abort what runs and take nothing new."""
        ...

    async def resume(self) -> None:
        """Take requests again; an update whose last bucket has not come was given up and is dropped."""
        ...

    async def update_weights(self, bucket: WeightBucket) -> None:
        """Take one bucket; the version rises with the last one, and only then."""
        ...

    async def set_memory(self, *, released: bool) -> None:
        """Give weights and cache memory back to the trainer, or take them again."""
        ...

    def close(self) -> None:
        """Stop what this engine started."""
        ...


@runtime_checkable
class Measured(Protocol):
    """What an engine may have beside its six methods: something to say of every step."""

    def take_metrics(self) -> Metrics:
        """What happened since the last call, under `engine/`."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """What an engine may have beside its six methods: how much it serves at once."""

    @property
    def max_concurrency(self) -> int:
        """Requests at once; more wait for their turn in the engine, and use up their episode's deadline there."""
        ...


@runtime_checkable
class Stalling(Protocol):
    """What an engine may have beside its six methods: times in which it could serve nobody."""

    @property
    def stalled_seconds(self) -> float:
        """How long that was in all; grows while it lasts."""
        ...


class Environment(Protocol):
    """Plays one episode."""

    async def run(self, prompt: Prompt, engine: RolloutEngine, params: SamplingParams, request_id: str) -> Trajectory:
        """Play `prompt` once; the trajectory is not scored yet."""
        ...


class Scorer(Protocol):
    """Puts numbers on trajectories: all named rewards of a run, and their weights."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        """The trajectory with `reward_components` and `reward`, or with status `error`; never a silent zero."""
        ...

    def check_prompts(self, prompts: Iterable[Prompt]) -> list[str]:
        """Problems of gold answers (one line each, with file and line); [] where all can be scored."""
        ...

    def close(self) -> None:
        """Stop the worker processes."""
        ...


class Team(Protocol):
    """The processes of a run. Rank 0 leads: it alone has engines, verifiers, data and the run folder.

    Every rank calls the same methods in the same order. Ranks wait for the leader, however long it samples or
    evaluates, for as long as it lives.
    """

    @property
    def rank(self) -> int:
        """Of this process."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        ...

    def begin(self, step: int) -> None:
        """Say, for whoever asks why nothing moves, that this rank is at `step`."""
        ...

    def phase(self, name: str) -> None:
        """And in which part of it."""
        ...

    def meet(self) -> None:
        """Wait until every rank is here."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether it is True on any rank."""
        ...

    def spread(self, data: bytes | None) -> bytes:
        """The leader's `data`, on every rank; what others give is not read."""
        ...

    def deliver(self, part_of: Callable[[int], bytes]) -> bytes:
        """What the leader's `part_of` says for the data-parallel rank of this one; the leader itself gets nothing."""
        ...

    def __enter__(self) -> Self:
        """Itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tell the other ranks of an error, or leave it to the one that told first.

        Raises:
            PeerError: another rank has told of a fault.
        """
        ...


class Stateful(Protocol):
    """Has a memory that a checkpoint must hold."""

    def state_dict(self) -> dict[str, Any]:
        """The memory, as plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        ...


class PromptSource(Protocol):
    """Hands out prompts in a seeded order; its cursor can be saved."""

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts, over epoch borders."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken."""
        ...


class Rollouts(Protocol):
    """The buffer between rollout and learning."""

    def take(self, step: int, version: int) -> tuple[list[RolloutGroup], Metrics]:
        """A step's worth of accepted groups for a policy of `version`, and what it cost."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Data cursor and counters, as plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        ...


class Policy(Protocol):
    """The learner."""

    @property
    def version(self) -> int:
        """Completed updates."""
        ...

    def score(self, batch: StepBatch, needs: frozenset[str]) -> tuple[StepBatch, Metrics]:
        """Fill old / reference logprobs and routes, as `needs` asks; metrics of the pair (rollout, old)."""
        ...

    def update(self, batch: StepBatch, objective: Any) -> Metrics:
        """One optimizer step per minibatch; metrics of the objective, the optimizer and of the pair (old, current)."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, streamed; the order is fixed."""
        ...

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Copy weights, optimizer, schedule and RNG; the work writes the copy into `folder`, in any thread, while the
        policy trains on.
        """
        ...

    def save(self, folder: Path) -> None:
        """Both at once, into `folder` (which exists and is empty)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit."""
        ...


class Critic(Protocol):
    """The value function beside the policy."""

    version: int

    def score(self, batch: StepBatch) -> StepBatch:
        """Fill `old_values`."""
        ...

    def update(self, batch: StepBatch) -> Metrics:
        """One optimizer step per minibatch toward the batch's `returns`."""
        ...

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """As the policy's; everything goes into a folder of its own inside `folder`."""
        ...

    def save(self, folder: Path) -> None:
        """Both at once."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit."""
        ...


class MetricSink(Protocol):
    """Where metrics go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One record."""
        ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """A few rollouts, readable."""
        ...

    def close(self) -> None:
        """Flush."""
        ...
