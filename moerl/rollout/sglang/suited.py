"""Whether a server, as it was started, suits the run that is to use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moerl.errors import RolloutError

if TYPE_CHECKING:
    from moerl.rollout.sglang.client import ServerInfo


def refuse_unsuited(
    url: str, info: ServerInfo, *, needs_routes: bool, needs_memory_saver: bool, longest_tokens: int
) -> None:
    """Refuse what would fail later, or bring nothing without a word.

    Args:
        url: of the server, for messages.
        info: what it says of itself.
        needs_routes: the experts of every token are asked for.
        needs_memory_saver: its memory is to be released.
        longest_tokens: of prompt and answer together.

    Raises:
        RolloutError: it has too little room, or was started without the routes or the memory saver.
    """
    if needs_routes and not info.returns_routes:
        raise RolloutError(
            f"{url} was started without --enable-return-routed-experts, but routes are needed (R3); "
            "start it with that flag, or choose another algorithm.routing"
        )
    if needs_memory_saver and info.values.get("enable_memory_saver") is not True:
        raise RolloutError(
            f"{url} was started without --enable-memory-saver, so rollout.engine.release_memory would "
            "free nothing; start it with that flag, or set release_memory to false"
        )
    if info.context_length is not None and info.context_length < longest_tokens:
        raise RolloutError(
            f"{url} holds {info.context_length} tokens of prompt and answer, but data.max_prompt_tokens "
            f"+ rollout.max_new_tokens is {longest_tokens}; lower them, or start it with a larger --context-length "
            "and --max-total-tokens (rollout.engine.servers.context_tokens, max_total_tokens)"
        )
