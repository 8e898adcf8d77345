"""The servers of a run: who is fit to serve, how much each has to do, and which lane a request goes to.

A lane is one rank of attention data parallelism of one server, or the whole server where it has one rank. Prefix caches
belong to lanes, so a group's shared prompt goes to one lane until that one has `slack` requests more than the idlest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from moerl.rollout.sglang.client import SglangClient

logger = logging.getLogger(__name__)

MemberState = Literal["fit", "out"]

_MAX_REMEMBERED = 65_536
"""Prompts whose lane is remembered."""


@dataclass(eq=False)
class Lane:
    """Where requests run."""

    member: Member
    data_rank: int | None
    """None: the server has one rank and is not told."""
    capacity: int
    load: int = 0
    """Requests that it has."""


@dataclass(eq=False)
class Member:
    """One server as the pool sees it."""

    client: SglangClient
    lanes: list[Lane] = field(default_factory=list)
    state: MemberState = "fit"
    why_out: str = ""
    must_replay: bool = False
    """It left while weights or memory were on their way: whatever its label says, they are sent again."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is asked to come back, and while it lends its memory though it is out."""
    failures: int = 0
    """In a row, of the kinds that speak against the server."""
    num_ejections: int = 0
    num_returns: int = 0
    num_answers: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"server {self.client.index} ({self.client.url})"


class Pool:
    """Hands out lanes, bounded, in the order of asking; nothing is handed out while the gate is shut."""

    def __init__(self, clients: Sequence[SglangClient], *, capacity: int, slack: int) -> None:
        """`capacity`: requests at one server at once. `slack`: see the module's first lines."""
        self.members = [Member(client) for client in clients]
        self._slack = slack
        self._capacity = capacity
        self._homes: OrderedDict[str, Lane] = OrderedDict()
        self._waiting: deque[tuple[asyncio.Future[Lane], str]] = deque()
        self._unfit_since: float | None = None
        self._unfit_seconds = 0.0
        self.shut_by: set[str] = set()
        """Why the gate is shut; empty: it is open."""
        for member in self.members:
            self.set_ranks(member, 1)

    def set_ranks(self, member: Member, data_size: int) -> None:
        """The server's number of data-parallel ranks, once it is known; before any request.

        They share the server's capacity; with more ranks than that each has room for one request.
        """
        share, rest = divmod(self._capacity, data_size)
        ranks = [None] if data_size == 1 else range(data_size)
        member.lanes = [Lane(member, rank, max(1, share + (i < rest))) for i, rank in enumerate(ranks)]

    @property
    def fit(self) -> list[Member]:
        """Members that serve."""
        return [member for member in self.members if member.state == "fit"]

    @property
    def seconds_without_fit(self) -> float:
        """In all, until now. Any thread may ask."""
        since = self._unfit_since
        return self._unfit_seconds + (0.0 if since is None else monotonic() - since)

    @property
    def num_waiting(self) -> int:
        """Requests that no lane has room for."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that a server has."""
        return sum(lane.load for member in self.members for lane in member.lanes)

    async def take(self, home: str) -> Lane:
        """A lane with room; waits for one. `home` names what shares a prefix. Give it back with `give_back`."""
        if not self._waiting and (lane := self._choose(home)) is not None:
            return self._taken(lane, home)
        future: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, home))
        try:
            return await future
        except asyncio.CancelledError:
            if (
                future.done() and not future.cancelled() and future.exception() is None
            ):  # handed out and cancelled in the same turn
                self.give_back(future.result())
            raise

    def give_back(self, lane: Lane) -> None:
        """The request that had it is over."""
        lane.load -= 1
        assert lane.load >= 0
        self.hand_out()

    def shut(self, reason: str) -> None:
        """Hand out no lane."""
        self.shut_by.add(reason)

    def open(self, reason: str) -> None:
        """The reason is gone."""
        self.shut_by.discard(reason)
        self.hand_out()

    def eject(self, member: Member, why: str) -> bool:
        """Send it nothing more; True where it was fit until now."""
        if member.state == "out":
            return False
        member.state, member.why_out = "out", why
        member.num_ejections += 1
        member.must_replay = member.must_replay or bool(self.shut_by)
        for prompt in [prompt for prompt, lane in self._homes.items() if lane.member is member]:
            del self._homes[prompt]
        if not self.fit:
            self._unfit_since = monotonic()
        logger.warning("%s is out: %s", member.name, why)
        return True

    def readmit(self, member: Member) -> None:
        """It serves again."""
        if member.state == "out":
            member.state, member.why_out, member.failures, member.must_replay = "fit", "", 0, False
            member.num_returns += 1
            if self._unfit_since is not None:
                self._unfit_seconds, self._unfit_since = self.seconds_without_fit, None
            logger.warning("%s serves again", member.name)
            self.hand_out()

    def hand_out(self) -> None:
        """Give lanes to those that wait, as far as there is room."""
        while self._waiting:
            future, home = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            lane = self._choose(home)
            if lane is None:
                return
            self._waiting.popleft()
            future.set_result(self._taken(lane, home))

    def fail(self, error: Exception) -> None:
        """Everything that waits gets `error`."""
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def _taken(self, lane: Lane, home: str) -> Lane:
        lane.load += 1
        self._homes.setdefault(home, lane)
        self._homes.move_to_end(home)
        if len(self._homes) > _MAX_REMEMBERED:
            self._homes.popitem(last=False)
        return lane

    def _choose(self, home: str) -> Lane | None:
        if self.shut_by:
            return None
        best: Lane | None = None
        for member in self.members:
            if member.state != "fit":
                continue
            for lane in member.lanes:
                if lane.load < lane.capacity and (best is None or lane.load < best.load):
                    best = lane
        wanted = self._homes.get(home)
        if wanted is None or best is None or wanted.load >= wanted.capacity or wanted.member.state != "fit":
            return best
        return wanted if wanted.load <= best.load + self._slack else best
