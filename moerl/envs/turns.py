"""One turn of an episode: asks the engine, and goes on where it aborts, with the budget that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moerl.envs.episode import Episode
from moerl.protocols import RolloutEngine
from moerl.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Turn:
    """What was sampled in one turn."""

    token_ids: np.ndarray
    """[s] int32, the stop token included where one was drawn."""
    finish_reason: FinishReason
    """`abort` where the engine aborted more often than it may."""
    aborts: int

    def without_stop(self, stop_token_ids: Sequence[int]) -> list[int]:
        """The tokens without the stop token that ended the turn; a stop string stays."""
        tokens = self.token_ids.tolist()
        return tokens[:-1] if tokens and tokens[-1] in stop_token_ids else tokens


async def play_turn(
    episode: Episode,
    engine: RolloutEngine,
    params: SamplingParams,
    request_id: str,
    *,
    budget: int,
    max_aborts: int,
) -> Turn:
    """Sample at most `budget` tokens (1 or more) onto `episode`. An aborted answer is continued from the same tokens.

    Raises:
        RolloutError: the engine's answer breaks its protocol.
    """
    start, aborts = len(episode.token_ids), 0
    while True:
        left = budget - (len(episode.token_ids) - start)
        asked = replace(
            params,
            max_new_tokens=left,
            seed=(params.seed + episode.num_added) % 2**63,
            routes_from=episode.num_routed,
        )
        completion = await engine.generate(episode.token_ids, asked, request_id)
        episode.add(completion, asked, request_id)
        sampled = episode.token_ids[start:]
        if completion.finish_reason != "abort":
            return Turn(sampled, completion.finish_reason, aborts)
        if len(completion.token_ids) and int(sampled[-1]) in params.stop_token_ids:
            return Turn(sampled, "stop", aborts)  # an engine that looks for no end in the step that aborts
        if len(sampled) == budget:
            return Turn(sampled, "length", aborts)
        aborts += 1
        if aborts > max_aborts:
            return Turn(sampled, "abort", aborts)
