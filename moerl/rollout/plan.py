"""Which groups may be started ahead of training, and which a step trains on: arithmetic alone, no clock, no thread.

A ticket is one group from when its prompt is drawn until it is trained on or dropped. With `max_staleness` n, when a
step takes its groups, tickets of n + 1 steps are under way: its own and n steps' worth ahead. A ticket started at
version v must be trained at version v + n at the latest, its deadline. The number under way bounds the age: as a step
uses up its worth and a new version opens the next, no more can have the same deadline than a step trains on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moerl.errors import CheckpointError
from moerl.rollout.saved import loaded_trajectory, saved_trajectory
from moerl.types import Prompt, RolloutGroup, Trajectory

LongTail = Literal["wait", "resume", "drop"]


@dataclass(frozen=True)
class PlanSettings:
    """Sizes."""

    prompts_per_step: int
    """Groups that a step trains on."""
    started_per_step: int
    """Groups that are started for it: `prompts_per_step` times over-sampling."""
    max_staleness: int
    refill_rounds: int
    """A step's dropped groups are replaced this many times `started_per_step` at most."""
    long_tail: LongTail
    """`wait`: steps train on prompts in the order they were drawn. `resume`: on what is finished, as long as all others
    can still meet their deadline. `drop`: on what is finished; the others are dropped at their deadline."""
    last_step: int | None = None
    """Of the run: nothing is started for later ones. None: no end is known."""


@dataclass
class Ticket:
    """One group under way."""

    number: int
    """Order in which prompts were drawn."""
    prompt: Prompt
    plan_step: int
    """Step that counts on it; later where others took its place."""
    seed_step: int
    first_index: int
    """With `seed_step`, the seeds of its episodes."""
    version: int
    """Of the engines when it was started."""
    episodes: dict[int, Trajectory] = field(default_factory=dict)
    """Finished ones by their place in the group."""
    group: RolloutGroup | None = None
    """Once all are finished."""
    started: float = 0.0
    """By the buffer's clock."""

    @property
    def oldest(self) -> int:
        """Lowest version that any token of it has, or that a running episode can have begun with."""
        versions = [span[2] for episode in self.episodes.values() for span in episode.version_spans]
        if self.group is None or not versions:
            versions.append(self.version)
        return min(versions)


class Plan:
    """All tickets under way."""

    def __init__(self, settings: PlanSettings) -> None:
        """Nothing may be started before the first `publish` or `begin`."""
        self.settings = settings
        self.tickets: dict[int, Ticket] = {}
        """By number, ascending."""
        self.step = 0
        """The last one that took its groups."""
        self.version = -1
        """That the engines serve."""
        self._is_open = False
        """Whether the step after `step` will train this version."""
        self._next_number = 0
        self._lost: Counter[int] = Counter()
        self._replaced: Counter[int] = Counter()
        self._seen: Counter[tuple[int, str]] = Counter()

    def publish(self, version: int) -> None:
        """The engines serve `version` now; an old one changes nothing."""
        if version > self.version:
            self.version = version
            self._is_open = True

    def begin(self, step: int, version: int) -> None:
        """Before `step` chooses: whatever became of the step before, the next one is open."""
        self.step = step - 1
        self.version = max(self.version, version)
        self._is_open = True

    def next_step(self) -> int | None:
        """The step that a new ticket is to be started for; None where enough is under way."""
        num_open = self.settings.max_staleness + self._is_open
        if len(self.tickets) >= num_open * self.settings.started_per_step:
            return None
        planned = Counter(ticket.plan_step for ticket in self.tickets.values())
        last = self.step + num_open
        if self.settings.last_step is not None:
            last = min(last, self.settings.last_step)
        for step in range(self.step + 1, last + 1):
            if planned[step] + self._lost[step] < self.settings.started_per_step:
                return step
        return None

    def start(self, prompt: Prompt, plan_step: int, group_size: int) -> Ticket:
        """A ticket of its own; a prompt that comes again within a step gets new seeds."""
        repeats = self._seen[plan_step, prompt.prompt_id]
        self._seen[plan_step, prompt.prompt_id] += 1
        ticket = Ticket(self._next_number, prompt, plan_step, plan_step, repeats * group_size, self.version)
        self._next_number += 1
        self.tickets[ticket.number] = ticket
        return ticket

    def refuse(self, ticket: Ticket) -> None:
        """A filter dropped it: its place is for another one, within the bound of refills."""
        del self.tickets[ticket.number]
        step, limit = ticket.plan_step, self.settings.refill_rounds * self.settings.started_per_step
        if self._replaced[step] < limit:
            self._replaced[step] += 1
        else:
            self._lost[step] += 1

    def give_up(self, ticket: Ticket) -> None:
        """It is late or stale: its place is for another one."""
        del self.tickets[ticket.number]

    def expired(self) -> list[Ticket]:
        """Those that no step can train on any more."""
        return [ticket for ticket in self.tickets.values() if self._deadline(ticket) < self.version]

    def choose(self) -> list[Ticket] | None:
        """What the step after `step` trains on, at most `prompts_per_step`; None: wait until more is finished."""
        due = [ticket for ticket in self.tickets.values() if ticket.plan_step <= self.step + 1]
        if self.settings.long_tail == "wait":
            first = due[: self.settings.prompts_per_step]
            return first if all(ticket.group is not None for ticket in first) else None
        ready = [ticket for ticket in self.tickets.values() if ticket.group is not None]
        ready.sort(key=lambda ticket: (self._deadline(ticket), ticket.number))
        wanted = min(self.settings.prompts_per_step, len(due))
        if len(ready) < wanted or (self.settings.long_tail == "resume" and not self._leaves_time(ready)):
            return None
        return ready[:wanted]

    def end(self, chosen: Iterable[Ticket]) -> list[Ticket]:
        """The step took `chosen`. What is late by that is returned: the caller gives it up."""
        for ticket in chosen:
            del self.tickets[ticket.number]
        self.step += 1
        self._is_open = False
        for ticket in self.tickets.values():
            ticket.plan_step = max(ticket.plan_step, self.step + 1)
        for counter in (self._lost, self._replaced):
            for step in [step for step in counter if step <= self.step]:
                del counter[step]
        for key in [key for key in self._seen if key[0] <= self.step]:
            del self._seen[key]
        if self.settings.long_tail != "drop":
            return []
        return [ticket for ticket in self.tickets.values() if self._deadline(ticket) <= self.version]

    def _deadline(self, ticket: Ticket) -> int:
        return ticket.oldest + self.settings.max_staleness

    def _leaves_time(self, ready: list[Ticket]) -> bool:
        """Whether all that is not trained on now can be, by its deadline, at a step's worth for each version."""
        size = self.settings.prompts_per_step
        for later in range(self.settings.max_staleness + 1):
            last = self.version + later
            must = sum(self._deadline(ticket) <= last for ticket in self.tickets.values()) - later * size
            if sum(self._deadline(ticket) <= last for ticket in ready) < min(size, must):
                return False
        return True

    def state_dict(self) -> dict[str, Any]:
        """JSON values and arrays."""
        return {
            "step": self.step,
            "version": self.version,
            "is_open": self._is_open,
            "next_number": self._next_number,
            "lost": sorted(self._lost.items()),
            "replaced": sorted(self._replaced.items()),
            "seen": [[*key, count] for key, count in sorted(self._seen.items())],
            "tickets": [_saved(ticket) for ticket in self.tickets.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any], find: Callable[[str], Prompt], group_size: int) -> None:
        """Restore it; `find` gives a prompt by its id.

        Raises:
            CheckpointError: something is missing or damaged.
        """
        try:
            self.step, self.version = int(state["step"]), int(state["version"])
            self._is_open = bool(state["is_open"])
            self._next_number = int(state["next_number"])
            self._lost = Counter({int(step): int(count) for step, count in state["lost"]})
            self._replaced = Counter({int(step): int(count) for step, count in state["replaced"]})
            self._seen = Counter({(int(step), str(name)): int(count) for step, name, count in state["seen"]})
            tickets = [_loaded(one, find, group_size) for one in state["tickets"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the rollout buffer's plan is damaged ({type(error).__name__}: {error}); use another checkpoint"
            ) from error
        self.tickets = {ticket.number: ticket for ticket in tickets}


def _saved(ticket: Ticket) -> dict[str, Any]:
    return {
        "number": ticket.number,
        "prompt_id": ticket.prompt.prompt_id,
        "plan_step": ticket.plan_step,
        "seed_step": ticket.seed_step,
        "first_index": ticket.first_index,
        "version": ticket.version,
        "episodes": [[place, saved_trajectory(one)] for place, one in sorted(ticket.episodes.items())],
    }


def _loaded(state: Mapping[str, Any], find: Callable[[str], Prompt], group_size: int) -> Ticket:
    ticket = Ticket(
        number=int(state["number"]),
        prompt=find(state["prompt_id"]),
        plan_step=int(state["plan_step"]),
        seed_step=int(state["seed_step"]),
        first_index=int(state["first_index"]),
        version=int(state["version"]),
        episodes={int(place): loaded_trajectory(one) for place, one in state["episodes"]},
    )
    if len(ticket.episodes) == group_size:
        ticket.group = RolloutGroup(ticket.prompt, tuple(ticket.episodes[place] for place in range(group_size)))
    return ticket
