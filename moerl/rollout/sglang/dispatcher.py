"""Spreads requests over servers: each is answered once, by a server that is fit, or fails with one clear error.

A request takes a lane of the pool, is sent, and its answer is read. What a server did to it decides what follows: a
lost, broken or late one sends it elsewhere under a new rid (nothing of the first attempt is kept, so nothing counts
twice), a busy one is asked again until it has room, an aborted one is continued from its own tokens, and a wrong
request or a wrong answer is raised. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moerl.errors import MoerlError, RolloutError, is_lost
from moerl.rollout.engine import prompt_id_of
from moerl.rollout.sglang.client import PauseMode, SglangClient
from moerl.rollout.sglang.counts import DispatchCounts
from moerl.rollout.sglang.faults import ServerError
from moerl.rollout.sglang.partials import Partial
from moerl.rollout.sglang.pool import Lane, Member, Pool
from moerl.rollout.sglang.tries import Tries, drawn_wait
from moerl.rollout.sglang.wire import Answer, Expected, check_params, payload, read_answer
from moerl.types import Completion, SamplingParams

logger = logging.getLogger(__name__)

PAUSED, NO_WEIGHTS = "paused", "no_weights"
"""Reasons of a shut gate."""


@dataclass(frozen=True)
class DispatchSettings:
    """How hard servers are tried."""

    requests_per_server: int = 256
    """At once; more wait here."""
    affinity_slack: int = 8
    """Requests that a prompt's own lane may have more than the idlest."""
    request_timeout_seconds: float = 1800.0
    """Of one attempt; longer than the longest pause, since a dropped socket aborts the request."""
    num_retries: int = 5
    """Attempts beside the first, of one completion; those that a full queue turned away (429, 503) do not count."""
    retry_wait_seconds: float = 0.25
    """Before the first of them; doubled each time, up to 10 s, and drawn by chance between half and all of it. As long
    after the first answer of a full queue, and doubled with each one that follows it."""
    resume_aborted: bool = True
    """Continue what a server aborted; otherwise the completion ends with finish reason `abort`."""
    max_resumes: int = 64
    failures_to_eject: int = 3
    """Server errors (5xx) or late answers in a row; a lost connection ejects at once."""


@dataclass(eq=False)
class _Flight:
    """One completion on its way."""

    request_id: str
    rid: str = ""
    lane: Lane | None = None
    failed_at: Member | None = None
    """Where the last attempt failed, until it was tried again."""
    is_ended: bool = False
    """Somebody asked for its end: what is there is the answer."""
    task: asyncio.Task[object] | None = None
    """That waits for the answer; set while a server has the request."""
    is_cut: bool = False
    """`task` was cancelled by `Dispatcher.cut`, which is no cancelling of the completion."""


class Dispatcher:
    """See the module's first lines. `watch.py` brings servers back that were ejected."""

    def __init__(
        self,
        clients: Sequence[SglangClient],
        *,
        settings: DispatchSettings | None = None,
        expected: Expected | None = None,
        context_length: int | None = None,
    ) -> None:
        """Wire it.

        Args:
            clients: one per server; they are not closed here.
            settings: None takes the defaults.
            expected: what every answer is held to.
            context_length: tokens of prompt and answer that the servers can hold.

        Raises:
            RolloutError: no clients.
        """
        if not clients:
            raise RolloutError("a dispatcher needs at least one server; set rollout.engine.urls")
        self.settings = settings or DispatchSettings()
        self.expected = expected or Expected()
        self.pool = Pool(clients, capacity=self.settings.requests_per_server, slack=self.settings.affinity_slack)
        self.counts = DispatchCounts()
        self.policy_version = 0
        """Of the weights that every fit server has."""
        self.is_published = False
        """Whether those came from here; before, they are the ones that the servers were started with."""
        self._context_length = context_length
        self._flights: dict[_Flight, None] = {}
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)
        self._chores: set[asyncio.Task[None]] = set()

    @property
    def num_in_flight(self) -> int:
        """Completions that were asked for and not answered."""
        return len(self._flights)

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        """One completion. While the gate is shut, or every lane is full, it waits.

        Cancelling it aborts the request at the server that has it.

        Raises:
            RolloutError: a request that cannot be served, an answer that breaks the protocol, or the retries are used
                up; names the request and the server.
        """
        layout = self.expected.layout if params.return_routes else None
        partial = Partial(np.asarray(token_ids, dtype=np.int32), params, layout, self._context_length)
        self._check(partial, request_id)
        flight = _Flight(request_id)
        self._flights[flight] = None
        try:
            completion = await self._complete(partial, flight)
        except asyncio.CancelledError:
            self.counts.aborted += 1
            self._send_abort(flight)
            raise
        finally:
            del self._flights[flight]
        self.counts.completions += 1
        self.counts.generated_tokens += len(completion.token_ids)
        return completion

    async def abort(self, request_id: str) -> None:
        """End the request where it is; `generate` returns what it has, with finish reason `abort`. Unknown ids pass."""
        for flight in [flight for flight in self._flights if flight.request_id == request_id]:
            flight.is_ended = True
            if flight.lane is not None:
                await self._tell_abort(flight.lane.member, flight.rid)
                self._begin(self._tell_again(flight, flight.rid))

    async def pause(self, mode: PauseMode) -> None:
        """Shut the gate and pause every fit server; one that does not answer is ejected, be it the last.

        Raises:
            RolloutError: none is left, and one refused.
        """
        self.pool.shut(PAUSED)
        self.expected = replace(self.expected, needs_spans=self.expected.needs_spans or mode != "abort")
        await self.on_each(lambda client: client.pause(mode), "pause")

    async def resume(self) -> None:
        """Let every fit server go on, then open the gate.

        Raises:
            RolloutError: none is left, and one refused.
        """
        try:
            await self.on_each(lambda client: client.continue_generation(), "continue")
        finally:
            self.pool.open(PAUSED)

    async def on_each(self, call: Callable[[SglangClient], Awaitable[object]], what: str) -> None:
        """Do it at every fit server at once; one that fails is ejected.

        Where all of them are lost nothing is raised: it is as if none had been fit, and the watch brings them back.

        Raises:
            RolloutError: it failed at all of them, and one did not die of it but refused; names that one.
        """
        members = self.pool.fit
        results = await asyncio.gather(*(call(member.client) for member in members), return_exceptions=True)
        refused: MoerlError | None = None
        for member, result in zip(members, results, strict=True):
            if isinstance(result, MoerlError):
                refused = refused if is_lost(result) else result
                self.eject(member, f"it did not {what} ({result})")
            elif isinstance(result, BaseException):
                raise result
        if refused is not None and not self.pool.fit:
            raise RolloutError(f"no server is left to {what}: {refused}") from refused

    def eject(self, member: Member, why: str) -> None:
        """Send a server nothing more until the watch brings it back.

        Where it left in the middle of an update its requests are sent elsewhere: they would go on there with whatever
        part of the weights has come, and under the old label.
        """
        self.pool.eject(member, why)
        if member.must_replay:
            self.cut(member)

    def cut(self, member: Member) -> None:
        """Give up every request that `member` has; each is lost and sent elsewhere. The server sees its socket go."""
        for flight in self._flights:
            is_there = flight.lane is not None and flight.lane.member is member
            if is_there and flight.task is not None and not flight.is_cut:
                flight.is_cut = True
                flight.task.cancel()

    async def close(self) -> None:
        """Wait for the aborts that are on their way."""
        while self._chores:
            await asyncio.wait(self._chores)

    def _check(self, partial: Partial, request_id: str) -> None:
        try:
            check_params(partial.params, len(partial.prompt))
        except RolloutError as error:
            raise RolloutError(f"request {request_id}: {error}") from error
        if partial.budget < 1:
            raise RolloutError(
                f"request {request_id}: a prompt of {len(partial.prompt)} tokens leaves no room in a context of "
                f"{self._context_length}; nothing was asked. Shorten it, or raise the servers' context length"
            )

    async def _complete(self, partial: Partial, flight: _Flight) -> Completion:
        resumes, tries = 0, Tries(self.settings)
        while True:
            try:
                answer = await self._attempt(partial, flight)
            except ServerError as error:
                if flight.is_ended:
                    return partial.completion("abort", self.policy_version)
                seconds = tries.wait_after(error)
                if seconds is None:
                    raise RolloutError(f"request {flight.request_id}{tries.said()}: {error}") from error
                self.counts.retries += 1
                await asyncio.sleep(seconds)
                continue
            tries.note_answer()
            partial.add(answer)
            if answer.finish_reason != "abort":
                return partial.completion(answer.finish_reason, self.policy_version)
            if partial.left < 1:
                return partial.completion("length", self.policy_version)
            if flight.is_ended or not self.settings.resume_aborted or resumes == self.settings.max_resumes:
                return partial.completion("abort", self.policy_version)
            resumes += 1
            self.counts.resumes += 1
            if not len(answer.token_ids):
                await asyncio.sleep(drawn_wait(self.settings, 1))

    async def _attempt(self, partial: Partial, flight: _Flight) -> Answer:
        """One request at one server."""
        lane = await self.pool.take(prompt_id_of(flight.request_id))
        flight.lane, flight.rid = lane, self._new_rid()
        member, version = lane.member, self.policy_version
        self.counts.resent += flight.failed_at not in (None, member)
        flight.failed_at = None
        try:
            if flight.is_ended:
                raise ServerError("late", member.client.url, "/generate", "ended before it was sent", "nothing")
            request = partial.request(flight.rid, lane.data_rank)
            self.counts.requests += 1
            raw = await self._answer_of(flight, member, payload(request))
            answer = read_answer(raw, request, self.expected, server=member.client.url)
            self._refuse_lost_weights(member, answer, version)
            self._refuse_foreign_weights(member, answer)
        except ServerError as error:
            self._note_failure(member, error, flight)
            raise
        else:
            self._note_answer(member, answer, len(request.token_ids))
            flight.lane = None
            return answer
        finally:
            self.pool.give_back(lane)

    async def _answer_of(self, flight: _Flight, member: Member, body: dict[str, Any]) -> Any:
        """What the server says; while it is awaited, `cut` may give it up."""
        flight.task, flight.is_cut = asyncio.current_task(), False
        try:
            return await member.client.generate(body, timeout_seconds=self.settings.request_timeout_seconds)
        except asyncio.CancelledError as error:
            if not flight.is_cut or flight.task is None or flight.task.uncancel():  # the caller cancelled it too
                raise
            came = f"no answer until the server was taken out ({member.why_out})"
            raise ServerError("lost", member.client.url, "/generate", came, "see its log") from error
        finally:
            flight.task = None

    def _refuse_lost_weights(self, member: Member, answer: Answer, version: int) -> None:
        """A server that was started anew between two checks answers with the weights of its start."""
        if answer.spans and answer.spans[0][2] < version:
            raise ServerError(
                "lost",
                member.client.url,
                "/generate",
                f"tokens of policy version {answer.spans[0][2]}, although {version} was published before",
                "the server lost its weights; they are sent again",
            )

    def _refuse_foreign_weights(self, member: Member, answer: Answer) -> None:
        """Nobody here published what is newer than what is served from here."""
        newest = max((version for _, _, version in answer.spans), default=0)
        if newest > self.policy_version:
            raise ServerError(
                "bad_answer",
                member.client.url,
                "/generate",
                f"tokens of policy version {newest}, although {self.policy_version} is the newest that was published",
                "another trainer publishes to this server: give each run servers of its own",
            )

    def _note_failure(self, member: Member, error: ServerError, flight: _Flight) -> None:
        if error.kind == "late":
            self._send_abort(flight)
        flight.lane, flight.failed_at = None, member
        if flight.is_ended:
            return
        self.counts.note_fault(error.kind)
        if not error.is_suspect:
            return
        member.failures += 1
        if error.kind == "lost" or member.failures >= self.settings.failures_to_eject:
            self.eject(member, str(error))

    def _note_answer(self, member: Member, answer: Answer, prompt_tokens: int) -> None:
        member.failures = 0
        member.num_answers += 1
        self.counts.prompt_tokens += prompt_tokens
        self.counts.cached_tokens += answer.cached_tokens
        self.counts.retractions += answer.num_retractions
        self.counts.dropped_tokens += answer.num_dropped

    def _new_rid(self) -> str:
        """All of one length and different, so that none begins with another."""
        return f"moerl-{self._prefix}-{next(self._numbers):012d}"

    def _send_abort(self, flight: _Flight) -> None:
        """Beside what runs: the server may be gone."""
        if flight.lane is None:
            return
        self._begin(self._tell_abort(flight.lane.member, flight.rid))

    def _begin(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _tell_again(self, flight: _Flight, rid: str) -> None:
        """Until it is answered: an abort that overtook its request found nothing to end."""
        for place in itertools.count(1):
            await asyncio.sleep(drawn_wait(self.settings, place))
            if flight.task is None or flight.lane is None or flight.rid != rid:
                return
            await self._tell_abort(flight.lane.member, rid)

    async def _tell_abort(self, member: Member, rid: str) -> None:
        try:
            await member.client.abort(rid)
        except ServerError as error:
            logger.info("%s did not take the abort of %s (%s)", member.name, rid, error)
