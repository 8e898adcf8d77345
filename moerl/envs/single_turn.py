"""One prompt, one answer."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.envs import Decode, environments
from moerl.envs.episode import Episode
from moerl.envs.turns import play_turn
from moerl.errors import RolloutError
from moerl.protocols import RolloutEngine
from moerl.types import Prompt, SamplingParams, Trajectory


@dataclass(frozen=True)
class SingleTurnConfig:
    """Arguments of `rollout.environment: {name: single_turn}`."""

    max_aborts: int = 8
    """How often an answer that the engine aborted is continued before the episode counts as aborted."""


@environments.register("single_turn", SingleTurnConfig, injects=("decode", "max_context_tokens"))
class SingleTurn:
    """Asks once. An answer that the engine aborts is continued with the budget that is left, and the same tokens."""

    def __init__(self, cfg: SingleTurnConfig, *, decode: Decode, max_context_tokens: int) -> None:
        """`max_context_tokens` bounds prompt and response together."""
        self._max_aborts = cfg.max_aborts
        self._decode = decode
        self._max_context_tokens = max_context_tokens

    async def run(self, prompt: Prompt, engine: RolloutEngine, params: SamplingParams, request_id: str) -> Trajectory:
        """Play `prompt` once; without room for a single token the status is `too_long` and nothing is asked.

        `response_text` lacks the stop token that ended it; a stop string stays.

        Raises:
            RolloutError: the engine's answer breaks its protocol, or the prompt is empty.
        """
        if len(prompt.token_ids) == 0:
            raise RolloutError(f"prompt {prompt.prompt_id} has no tokens; check its row in {prompt.dataset}")
        episode = Episode(prompt.token_ids, temperature=params.temperature, wants_routes=params.return_routes)
        room = self._max_context_tokens - len(prompt.token_ids)
        if room < 1:
            reason = f"prompt of {len(prompt.token_ids)} tokens fills the context of {self._max_context_tokens}"
            return episode.finish(text="", finish_reason="length", status="too_long", error=reason)
        budget = min(params.max_new_tokens, room)
        turn = await play_turn(episode, engine, params, request_id, budget=budget, max_aborts=self._max_aborts)
        text = self._decode(turn.without_stop(params.stop_token_ids))
        if turn.finish_reason == "abort":
            reason = f"request {request_id} was aborted {turn.aborts} times"
            return episode.finish(text=text, finish_reason="abort", status="aborted", error=reason)
        return episode.finish(text=text, finish_reason=turn.finish_reason)
