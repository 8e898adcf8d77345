"""The memory that servers lend to the learner: which of them lent what, and a label on each that says so.

From before its memory goes until all of it is back, a server's label is none of weights but the lending's own: an
update that comes in between goes under that one too (`SglangClient.held_label`). So a server that says otherwise was
started anew and has all of its memory, and one that says so at the start of a run was left by a run that ended.

A run that ends while servers lend gives back what it can (`give_back`). Their weights are lost then, and their label
says that too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

from moerl.errors import MoerlError, WeightSyncError
from moerl.rollout.sglang.client import MemoryTag, SglangClient
from moerl.rollout.sglang.suited import EMPTY, LENT

logger = logging.getLogger(__name__)

TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")
GIVE_BACK_SECONDS = 30.0
"""For all servers at the end of a run: nothing waits for their memory then but the next run."""


class Lending:
    """Of one run; its calls come on the dispatcher's loop, for one server one at a time."""

    def __init__(self) -> None:
        """Nothing is lent."""
        self._lent: dict[SglangClient, set[MemoryTag]] = {}
        """What each server released and was not asked for again: of anything else SGLang dies when it is asked."""
        self._asked: set[SglangClient] = set()
        """Those whose last call to take memory again was not answered: they may have it or not."""
        self._label = f"{LENT}{secrets.token_hex(4)}"

    async def lend(self, client: SglangClient) -> None:
        """What it has not lent yet. A flush that is not refused says that it is idle; if it is not, it dies of this.

        Raises:
            MoerlError: it did not.
        """
        lent: set[MemoryTag] = self._lent.get(client, set())
        tags: list[MemoryTag] = [tag for tag in TAGS if tag not in lent]
        if tags:
            await client.flush_cache()
            await client.relabel(self._label)
            await client.release_memory(tags)
            self._note(client, lent | set(tags))

    async def look(self, client: SglangClient) -> None:
        """Before an update, which would put the lending's label on a process that lent nothing: is it still the one?

        Raises:
            MoerlError: it does not say.
        """
        if self._lent.get(client) and (await client.model_info()).weight_version != self._label:
            logger.warning("%s was started anew while its memory was released", client.url)
            self.forget(client)

    async def take_back(self, client: SglangClient, tags: Sequence[MemoryTag]) -> None:
        """Those of `tags` that it lent.

        Raises:
            MoerlError: it did not take them.
        """
        await self.look(client)
        lent: set[MemoryTag] = self._lent.get(client, set())
        wanted: list[MemoryTag] = [tag for tag in tags if tag in lent]
        if wanted:
            self._asked.add(client)
            await client.resume_memory(wanted)
            self._note(client, lent.difference(wanted))

    async def end(self, client: SglangClient, version: int) -> None:
        """It has the weights of `version`: take the rest, and only then label them as that.

        Raises:
            MoerlError: it did not, or has another label than was given with the weights.
        """
        held = client.held_label
        await _check_label(client, held or str(version), version)
        if held:
            await self.take_back(client, TAGS)
            await client.relabel(str(version))
            await _check_label(client, str(version), version)

    async def give_back(self) -> None:
        """The run ends: every server that lends takes all of its memory again, as far as it answers in time.

        They stay paused, and their label says that they have no weights: the next run has to publish before it asks.
        One of which it is not known whether it took its memory already keeps the lending's label. Raises nothing.
        """

        async def ask(client: SglangClient) -> None:
            try:
                async with asyncio.timeout(GIVE_BACK_SECONDS):
                    await self.take_back(client, TAGS)
                    if (await client.model_info()).weight_version == self._label:
                        await client.relabel(f"{EMPTY}{secrets.token_hex(4)}")
            except (MoerlError, TimeoutError) as error:
                why = str(error) or "no answer"
                logger.warning("%s may still lend its memory (%s): start it anew", client.url, why)

        lent = [client for client, tags in self._lent.items() if tags]
        await asyncio.gather(*(ask(client) for client in lent if client not in self._asked))

    def forget(self, client: SglangClient) -> None:
        """Its process is a new one, with all of its memory."""
        self._note(client, set())

    def _note(self, client: SglangClient, lent: set[MemoryTag]) -> None:
        self._lent[client] = lent
        self._asked.discard(client)
        client.held_label = self._label if lent else None


async def _check_label(client: SglangClient, wanted: str, version: int) -> None:
    label = (await client.model_info()).weight_version
    if label != wanted:
        raise WeightSyncError(f"{client.url} says that it has version {label!r} after the update to {version}")
