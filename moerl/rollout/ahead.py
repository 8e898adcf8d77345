"""The buffer of asynchronous training: groups are sampled ahead of the step that trains on them, in bounds of age.

Keeps `Rollouts`, as `RolloutBuffer` does for `rollout.max_staleness` 0; the loop cannot tell them apart. Everything
but `take`'s last lines runs on the event loop of the rollout thread, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moerl.errors import CheckpointError, RolloutError
from moerl.metrics import Last, Mean, Metrics, Sum, merge_into
from moerl.protocols import GroupFilter, PromptSource, Span
from moerl.rollout.buffer import COUNTERS, refuse_failures, why_dropped
from moerl.rollout.loop_thread import LoopThread
from moerl.rollout.plan import Plan, PlanSettings, Ticket
from moerl.rollout.rollout_metrics import rollout_metrics, staleness_metrics
from moerl.rollout.saved import loaded_trajectory, saved_trajectory
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

LATE, STALE = "late", "stale"


class Play(Protocol):
    """`Collector.play`."""

    def __call__(
        self, prompt: Prompt, index: int, *, step: int, params: SamplingParams, number: int | None = None
    ) -> Coroutine[Any, Any, Trajectory]:
        """One scored episode."""
        ...


@dataclass(frozen=True)
class AheadRooms:
    """What the buffer is wired to."""

    thread: LoopThread
    source: PromptSource
    find: Callable[[str], Prompt]
    """A prompt of the source by its id."""
    play: Play
    params: SamplingParams
    """Of every completion; its seed is not used."""
    group_filter: GroupFilter | None = None
    """Asked on the rollout thread as each group completes; remembers nothing."""
    observe: Callable[[RolloutGroup], object] | None = None
    """Told of every completed group, in the thread of `take`, when a step trains on it or counts it as dropped."""
    on_span: Span | None = None
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class _Dropped:
    """What became of a ticket that no step trains on; counted by the next step."""

    reason: str
    group: RolloutGroup | None
    """None where it was cut off."""


@dataclass(frozen=True)
class _Taken:
    chosen: list[RolloutGroup]
    dropped: list[_Dropped]
    metrics: Metrics

    @property
    def completed(self) -> list[RolloutGroup]:
        return [*self.chosen, *(one.group for one in self.dropped if one.group is not None)]


class _Busy:
    """Seconds in which anything is under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._since = 0.0
        self._seconds = 0.0

    def enter(self) -> None:
        if not self._count:
            self._since = self._clock()
        self._count += 1

    def leave(self) -> None:
        self._count -= 1
        if not self._count:
            self._seconds += self._clock() - self._since

    def seconds(self) -> float:
        return self._seconds + (self._clock() - self._since if self._count else 0.0)


class AheadBuffer:
    """Bounded staleness. What is under way and what is finished are in its state, so that nothing is lost on resume."""

    def __init__(
        self, rooms: AheadRooms, settings: PlanSettings, *, group_size: int, max_error_fraction: float = 0.1
    ) -> None:
        """`max_error_fraction`: as for `RolloutBuffer`, of all that a step trains on or counts as dropped."""
        self._rooms = rooms
        self._plan = Plan(settings)
        self._group_size = group_size
        self._max_error_fraction = max_error_fraction
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._dropped: list[_Dropped] = []
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._busy = _Busy(rooms.clock)
        self._busy_before = 0.0
        self._ended = rooms.clock()
        self._totals: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def published(self, version: int) -> None:
        """The engines serve `version`: start what that allows, and give up what is too old by it."""
        self._rooms.thread.run(self._publish(version))

    def take(self, step: int, version: int) -> tuple[list[RolloutGroup], Metrics]:
        """A step's worth of accepted groups, no token of which is more than `max_staleness` versions old.

        Waits only where too few are finished. Fewer may come where filters dropped more than `refill_rounds` replace.

        Args:
            step: rises by one with each call.
            version: of the policy that is about to train.

        Raises:
            RolloutError: too many failed episodes, or tokens older than the weights that were published.
            MoerlError: whatever failed on the rollout thread since the last call, such as a source without prompts.
        """
        taken = self._rooms.thread.run(self._take(step, version))
        if self._rooms.observe is not None:
            for group in taken.completed:
                if any(trajectory.status == "ok" for trajectory in group.trajectories):
                    self._rooms.observe(group)
        refuse_failures(taken.completed, step, self._max_error_fraction)
        return taken.chosen, taken.metrics

    def state_dict(self) -> dict[str, Any]:
        """Data cursor, counters, and every ticket with its finished episodes: JSON values and arrays."""
        return self._rooms.thread.run(self._state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; what was under way is asked again once the engines have weights.

        Raises:
            CheckpointError: something is missing or damaged.
        """
        missing = [key for key in ("source", "plan", "dropped", *COUNTERS) if key not in state]
        if missing:
            raise CheckpointError(
                f"rollout state lacks {', '.join(missing)}; use a checkpoint of this version of moerl that was made "
                "with rollout.max_staleness above 0"
            )
        self._rooms.thread.run(self._load(state))

    # On the rollout thread

    async def _publish(self, version: int) -> None:
        self._plan.publish(version)
        self._discard(self._plan.expired())
        self._watch(asyncio.create_task(self._fill_later()))

    async def _take(self, step: int, version: int) -> _Taken:
        started, busy = self._rooms.clock(), self._busy.seconds()
        self._plan.begin(step, version)
        self._discard(self._plan.expired())
        self._fill()
        while True:
            if self._failure is not None:
                raise self._failure
            self._discard(self._plan.expired())
            self._changed.clear()
            chosen = self._plan.choose()
            if chosen is not None:
                break
            await self._changed.wait()
        self._discard(self._plan.end(chosen))
        groups = [ticket.group for ticket in sorted(chosen, key=lambda one: one.number) if ticket.group is not None]
        self._fill()
        dropped, self._dropped = self._dropped, []
        taken = _Taken(groups, dropped, {})
        self._count(taken)
        merge_into(taken.metrics, self._metrics(taken, version))
        merge_into(taken.metrics, self._times(started, busy))
        return taken

    def _fill(self) -> None:
        """Start what the plan allows, and what a restored state had under way."""
        for ticket in list(self._plan.tickets.values()):
            if ticket.group is None and ticket.number not in self._tasks:
                ticket.version = self._plan.version
                self._start(ticket)
        while (step := self._plan.next_step()) is not None:
            (prompt,) = self._rooms.source.next_prompts(1)
            self._start(self._plan.start(prompt, step, self._group_size))

    async def _fill_later(self) -> None:
        self._fill()

    def _start(self, ticket: Ticket) -> None:
        ticket.started = self._rooms.clock()
        task = asyncio.create_task(self._play(ticket), name=f"group {ticket.number}")
        self._tasks[ticket.number] = task
        self._busy.enter()
        self._watch(task)

    def _watch(self, task: asyncio.Task[None]) -> None:
        task.add_done_callback(self._ended_task)

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        for number in [number for number, one in self._tasks.items() if one is task]:
            del self._tasks[number]
            self._busy.leave()
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
        self._changed.set()

    async def _play(self, ticket: Ticket) -> None:
        await asyncio.gather(
            *(self._episode(ticket, place) for place in range(self._group_size) if place not in ticket.episodes)
        )
        group = RolloutGroup(ticket.prompt, tuple(ticket.episodes[place] for place in range(self._group_size)))
        ticket.group = group
        reason = why_dropped(group, self._rooms.group_filter)
        if self._rooms.on_span is not None:
            said = {"step": ticket.plan_step, "version": ticket.oldest, "dropped": reason or ""}
            self._rooms.on_span(ticket.prompt.prompt_id, ticket.started, self._rooms.clock(), said)
        if reason is not None and ticket.number in self._plan.tickets:
            self._plan.refuse(ticket)
            self._dropped.append(_Dropped(reason, group))
            self._fill()

    async def _episode(self, ticket: Ticket, place: int) -> None:
        version = self._plan.version
        trajectory = await self._rooms.play(
            ticket.prompt,
            ticket.first_index + place,
            step=ticket.seed_step,
            params=self._rooms.params,
            number=ticket.number * self._group_size + place,
        )
        oldest = min((sampled for _, _, sampled in trajectory.version_spans), default=version)
        if oldest < version:
            raise RolloutError(
                f"prompt {ticket.prompt.prompt_id}: got tokens of policy version {oldest}, but version {version} was "
                "published before it was asked; an engine serves old weights: restart it and resume the run"
            )
        ticket.episodes[place] = trajectory

    def _discard(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._plan.give_up(ticket)
            self._dropped.append(_Dropped(LATE if ticket.group is None else STALE, ticket.group))
            task = self._tasks.get(ticket.number)
            if task is not None:
                task.cancel()
        if tickets:
            logger.info("%d groups were dropped, too old for the next step", len(tickets))

    def _count(self, taken: _Taken) -> None:
        self._totals["prompts_used"] += len(taken.chosen) + len(taken.dropped)
        self._totals["groups_dropped"] += len(taken.dropped)
        self._totals["errors"] += sum(t.status == "error" for group in taken.completed for t in group.trajectories)

    def _metrics(self, taken: _Taken, version: int) -> Metrics:
        reasons = Counter(one.reason for one in taken.dropped)
        counts: Metrics = {
            f"rollout/filter/{reason}": Sum(number) for reason, number in reasons.items() if reason not in (LATE, STALE)
        }
        counts["rollout/groups"] = Sum(len(taken.chosen))
        counts["rollout/groups_dropped"] = Sum(len(taken.dropped))
        counts["rollout/dropped_late"] = Sum(reasons[LATE])
        counts["rollout/dropped_stale"] = Sum(reasons[STALE])
        counts["rollout/prompts_used"] = Sum(len(taken.chosen) + len(taken.dropped))
        ready = sum(ticket.group is not None for ticket in self._plan.tickets.values())
        counts["rollout/buffered_groups"] = Last(float(ready))
        counts["rollout/running_groups"] = Last(float(len(self._plan.tickets) - ready))
        merge_into(counts, rollout_metrics(taken.completed, version))
        return counts | staleness_metrics(taken.chosen, version)

    def _times(self, started: float, busy: float) -> Metrics:
        """`started` and `busy` are of the beginning of this `take`; the step lasts from the end of the last one."""
        now, busy_now = self._rooms.clock(), self._busy.seconds()
        metrics: Metrics = {
            "perf/rollout_wait_seconds": Sum(now - started),
            "perf/generation_seconds": Sum(busy_now - self._busy_before),
            "perf/overlap_fraction": Mean(busy - self._busy_before, now - self._ended),
        }
        self._ended, self._busy_before = now, busy_now
        return metrics

    async def _state(self) -> dict[str, Any]:
        dropped = []
        for one in self._dropped:
            group = None
            if one.group is not None:
                group = [one.group.prompt.prompt_id, [saved_trajectory(t) for t in one.group.trajectories]]
            dropped.append([one.reason, group])
        return {
            "source": self._rooms.source.state_dict(),
            "plan": self._plan.state_dict(),
            "dropped": dropped,
            **self._totals,
        }

    async def _load(self, state: Mapping[str, Any]) -> None:
        self._rooms.source.load_state_dict(state["source"])
        self._plan.load_state_dict(state["plan"], self._rooms.find, self._group_size)
        self._dropped = []
        for reason, saved in state["dropped"]:
            group = None
            if saved is not None:
                group = RolloutGroup(self._rooms.find(saved[0]), tuple(loaded_trajectory(one) for one in saved[1]))
            self._dropped.append(_Dropped(reason, group))
        self._totals = {key: int(state[key]) for key in COUNTERS}
        for ticket in list(self._plan.tickets.values()):  # saved after its last episode, and before a filter saw it
            reason = ticket.group and why_dropped(ticket.group, self._rooms.group_filter)
            if ticket.group is not None and reason is not None:
                self._plan.refuse(ticket)
                self._dropped.append(_Dropped(reason, ticket.group))
