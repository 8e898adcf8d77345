"""Looks after the servers of a pool: checks their health, and brings back those that were ejected.

A server that comes back has to show the weights of now. One that was started anew has those of its start, so they are
sent to it again (`replay`) before it serves; one that cannot get them stays out. Nothing is checked while generation is
paused, since a paused server's health check waits for a token that does not come.

One check that is missed says little: a server that is busy may be late. It gets nothing new from then on, but what it
has is given up only where it misses the next check too, or its process is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from moerl.errors import MoerlError, RolloutError
from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.dispatcher import Dispatcher
from moerl.rollout.sglang.faults import ServerError
from moerl.rollout.sglang.pool import Member

logger = logging.getLogger(__name__)

Replay = Callable[[SglangClient], Awaitable[bool]]
"""Send the weights of now to one server, which then carries their label; False: there is nothing to send them from."""

Regain = Callable[[SglangClient], Awaitable[None]]
"""Let a server take the memory again that it lent, if it did."""

Revive = Callable[[int, bool], Awaitable[bool]]
"""(number of a server, whether it hangs) -> start it anew if its process is dead, or if it hangs; True where it was."""


@dataclass(frozen=True)
class WatchSettings:
    """Seconds."""

    health_seconds: float = 30.0
    """Between two checks of a server that serves."""
    first_probe_seconds: float = 0.5
    """Before a server that was ejected is first looked at; doubled each time."""
    longest_probe_seconds: float = 15.0
    probes_to_restart: int = 4
    """In a row that a server which is out did not answer, before it is started anew though its process lives."""
    no_server_seconds: float = 600.0
    """After so long without any fit server, what waits fails. A start that began in this time is waited for, and after
    one that succeeded the time begins anew."""


class Watch:
    """One task per server; they live until `close`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        settings: WatchSettings | None = None,
        replay: Replay | None = None,
        regain: Regain | None = None,
        revive: Revive | None = None,
    ) -> None:
        """`replay` None: a server with other weights stays out. `regain` None: no memory is ever lent. `revive` None:
        nobody restarts servers.
        """
        self._silent: Counter[Member] = Counter()
        """Probes in a row that a server which is out did not answer, since it was last started anew."""
        self._missed: Counter[Member] = Counter()
        """Checks in a row, of servers that serve too."""
        self._dispatcher = dispatcher
        self._settings = settings or WatchSettings()
        self._replay = replay
        self._regain = regain
        self._revive = revive
        self._tasks: list[asyncio.Task[None]] = []
        self._last_fit = time.monotonic()
        self._last_start = -math.inf
        """End of the last start that was waited for and succeeded."""
        self._num_starting = 0
        """Starts under way that are waited for."""

    def start(self) -> None:
        """On the running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._look_after(member)) for member in self._dispatcher.pool.members]
        self._tasks.append(loop.create_task(self._fail_what_waits()))

    async def close(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def try_return(self, member: Member) -> bool:
        """Bring an ejected server back if it is healthy and has, or gets, the weights of now."""
        async with member.lock:
            return await self._try_return(member)

    async def _try_return(self, member: Member) -> bool:
        pool, client, ejections = self._dispatcher.pool, member.client, member.num_ejections
        if pool.shut_by:
            return False
        if (fault := await self._fault_of(member)) is not None:
            logger.info("%s does not answer (%s)", member.name, fault)
            if not pool.shut_by:  # a pause that came meanwhile makes no server silent
                self._silent[member] += 1
                self._note_miss(member, fault)
            return False
        self._silent[member] = self._missed[member] = 0
        try:
            is_current = not member.must_replay and await self._has_weights(client)
            if not is_current:
                self._dispatcher.cut(member)  # a load would wait for it to end, and an update for the load
                is_current = await self._get_weights(client)
        except MoerlError as error:
            logger.info("%s is still out (%s)", member.name, error)
            return False
        if pool.shut_by or member.num_ejections != ejections:  # an update came meanwhile: what it has may be old by now
            return False
        if not is_current:
            logger.error(
                "%s is healthy but has other weights than version %d, and there is nothing to send them from; it stays "
                "out until the next update",
                member.name,
                self._dispatcher.policy_version,
            )
            return False
        pool.readmit(member)
        return True

    def _note_miss(self, member: Member, fault: MoerlError | TimeoutError) -> None:
        """Its requests are given up where they will not be answered; one late check of a busy server is not enough."""
        self._missed[member] += 1
        if self._missed[member] > 1 or (isinstance(fault, ServerError) and fault.kind == "lost"):
            self._dispatcher.cut(member)

    async def _fault_of(self, member: Member) -> MoerlError | TimeoutError | None:
        """What keeps a server that is out from going on; None: its scheduler answers."""
        client = member.client
        try:
            async with asyncio.timeout(2 * client.timeouts.health_seconds):
                if member.must_replay:  # nobody waits for what it has, and it has a part of the weights
                    await client.abort_all()
                if self._regain is not None:  # a health check samples a token, which needs all of the memory
                    await self._regain(client)
                await client.continue_generation()  # it may have been paused when it left, and is not healthy then
                await client.check_health()
        except (MoerlError, TimeoutError) as error:
            return error
        return None

    async def _get_weights(self, client: SglangClient) -> bool:
        if self._replay is None or not await self._replay(client):
            return False
        await client.flush_cache()
        return await self._has_weights(client)

    async def _has_weights(self, client: SglangClient) -> bool:
        """The label is of the version that was published from here, or of the start where nothing was."""
        label = (await client.model_info()).weight_version
        version = self._dispatcher.policy_version
        if self._dispatcher.is_published:  # the start's weights may be of version 0, and others than were published
            return label == str(version)
        return self._dispatcher.expected.labels.get(label, label) in (version, str(version))

    async def _look_after(self, member: Member) -> None:
        settings, wait = self._settings, self._settings.first_probe_seconds
        while True:
            if member.state == "out":
                await asyncio.sleep(wait)
                wait = min(wait * 2, settings.longest_probe_seconds)
                await self._revive_quietly(member)
                if await self.try_return(member):
                    wait = settings.first_probe_seconds
                continue
            wait = settings.first_probe_seconds
            await self._sleep_while_fit(member)
            if member.state == "fit":
                await self._check(member)

    async def _check(self, member: Member) -> None:
        """Take out a server that serves and is not healthy; nothing where a pause came before or during the check."""
        shut_by = self._dispatcher.pool.shut_by
        if shut_by:
            return
        try:
            await member.client.check_health()
        except ServerError as fault:
            if not shut_by:
                self._dispatcher.eject(member, f"its health check failed ({fault})")
                self._note_miss(member, fault)
        else:
            self._missed[member] = 0

    async def _sleep_while_fit(self, member: Member) -> None:
        """Until the next check is due, or it was ejected: that is looked at every probe interval."""
        end = time.monotonic() + self._settings.health_seconds
        while member.state == "fit" and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self._settings.first_probe_seconds))

    async def _revive_quietly(self, member: Member) -> None:
        if self._revive is None:
            return
        is_hung = self._silent[member] >= self._settings.probes_to_restart
        # one that began later does not count: servers that end again and again would be waited for without an end
        is_waited_for = time.monotonic() - self._last_fit <= self._settings.no_server_seconds
        self._num_starting += is_waited_for
        try:
            if await self._revive(member.client.index, is_hung) and is_waited_for:
                self._last_start = time.monotonic()
        except (MoerlError, OSError) as error:  # what the system refuses now, it may allow at the next try
            logger.warning("%s was not started anew (%s)", member.name, error)
        finally:
            self._num_starting -= is_waited_for
        if is_hung:
            self._silent[member] = 0

    async def _fail_what_waits(self) -> None:
        pool, limit = self._dispatcher.pool, self._settings.no_server_seconds
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            now = time.monotonic()
            if pool.fit or not pool.num_waiting:
                self._last_fit = now
            elif not self._num_starting and now - max(self._last_fit, self._last_start) > limit:
                why = "; ".join(f"{member.name}: {member.why_out}" for member in pool.members)
                pool.fail(RolloutError(f"no server was fit for {limit:g} s ({why}); see their logs"))
