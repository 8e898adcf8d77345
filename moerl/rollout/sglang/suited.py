"""Whether a server, as it was started, suits the run that is to use it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moerl.errors import RolloutError
from moerl.rollout.sglang.route_support import num_stages, refuse_without_routes

if TYPE_CHECKING:
    from moerl.rollout.sglang.client import ServerInfo, SglangClient

logger = logging.getLogger(__name__)

TESTED_VERSION = "0.5.23"
LENT = "lent-"
"""The label of a server begins with it while the learner has memory of it (`lending.py`)."""
EMPTY = "empty-"
"""The label of a server begins with it while its weights are lost: it lent them to a run that ended."""
DRAFT = "--speculative-algorithm"
LOST_DRAFT = "the draft model's weights are lost where memory is released, and no update sends them"


async def look_at_servers(
    clients: Sequence[SglangClient],
    first_version: int,
    *,
    needs_routes: bool,
    needs_memory_saver: bool,
    is_sent_live: bool,
    longest_tokens: int,
) -> tuple[dict[str, int], list[ServerInfo]]:
    """Labels of the weights at the start -> their version, and what each server says of itself.

    A label that is a number may be another run's version, so it is replaced by one that is none.

    Args:
        clients: of all servers.
        first_version: what their weights count as.
        needs_routes: see `refuse_unsuited`, as for the other three.
        needs_memory_saver: see there.
        is_sent_live: see there.
        longest_tokens: see there.

    Raises:
        RolloutError: a server does not answer, still lends its memory to a run that ended, or is none for this run:
            `refuse_unsuited`.
    """
    labels: dict[str, int] = {}
    infos = []
    for client in clients:
        label = (await client.model_info()).weight_version
        if label.startswith(LENT):  # before anything that its scheduler would die of, and with it the server
            raise RolloutError(
                f"server {client.url} still lends its memory to a run that ended (its weights' label is {label}): "
                "restart that server; if that run still trains, give this one servers of its own"
            )
        info = await client.server_info()
        if info.version != TESTED_VERSION:
            logger.warning("%s is SGLang %s; moerl is tested with %s", client.url, info.version, TESTED_VERSION)
        refuse_unsuited(
            client.url,
            info,
            needs_routes=needs_routes,
            needs_memory_saver=needs_memory_saver,
            is_sent_live=is_sent_live,
            longest_tokens=longest_tokens,
        )
        if label.isdigit() and int(label) != first_version:
            label = f"start-{secrets.token_hex(4)}"
            await client.relabel(label)
        if not label.startswith(EMPTY):  # what it samples is of no policy until something is published
            labels[label] = first_version
        infos.append(info)
    return labels, infos


def refuse_unsuited(
    url: str, info: ServerInfo, *, needs_routes: bool, needs_memory_saver: bool, is_sent_live: bool, longest_tokens: int
) -> None:
    """Refuse what would fail later, or bring nothing without a word.

    Args:
        url: of the server, for messages.
        info: what it says of itself.
        needs_routes: the experts of every token are asked for.
        needs_memory_saver: its memory is to be released.
        is_sent_live: weights come bucket by bucket, each to the ranks of one pipeline stage.
        longest_tokens: of prompt and answer together.

    Raises:
        RolloutError: it has too little room, was started without the routes or the memory saver, or in a way with which
            its routes are not those of its tokens, or with pipeline stages that the weights would not reach, or with a
            draft model that would lose its weights.
    """
    if needs_routes:
        refuse_without_routes(url, info)
    if is_sent_live and num_stages(info) > 1:
        raise RolloutError(
            f"{url} has --pp-size {num_stages(info)}, but weights reach one pipeline stage alone by this "
            "weight_sync.transport; start it with --pp-size 1, or set weight_sync.transport=disk"
        )
    if needs_memory_saver and info.values.get("enable_memory_saver") is not True:
        raise RolloutError(
            f"{url} was started without --enable-memory-saver, so rollout.engine.release_memory would "
            "free nothing; start it with that flag, or set release_memory to false"
        )
    if needs_memory_saver and info.values.get("speculative_algorithm") is not None:
        raise RolloutError(
            f"{url} has {DRAFT} {info.values['speculative_algorithm']}, but rollout.engine.release_memory is on: "
            f"{LOST_DRAFT}; start it without, or set release_memory to false"
        )
    if info.context_length is not None and info.context_length < longest_tokens:
        raise RolloutError(
            f"{url} holds {info.context_length} tokens of prompt and answer, but data.max_prompt_tokens "
            f"+ rollout.max_new_tokens is {longest_tokens}; lower them, or start it with a larger --context-length "
            "and --max-total-tokens (rollout.engine.servers.context_tokens, max_total_tokens)"
        )
