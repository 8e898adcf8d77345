"""The engine of supervised training: it answers with the prompt file's own completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moerl.errors import DataError, RolloutError
from moerl.rollout.engine import engines, prompt_id_of
from moerl.types import Completion, SamplingParams, WeightBucket


@dataclass(frozen=True)
class DatasetEngineConfig:
    """Arguments of `rollout.engine: {name: dataset}`: none."""


@engines.register("dataset", DatasetEngineConfig, injects=("completions", "policy_version"))
class DatasetEngine:
    """Keeps `RolloutEngine`. Logprobs are 0 and routes absent: nothing was sampled. Of weights it notes the version."""

    def __init__(
        self, cfg: DatasetEngineConfig, *, completions: Mapping[str, np.ndarray], policy_version: int = 0
    ) -> None:
        """`completions`: prompt id -> [s] int32, the end token included."""
        del cfg
        self.policy_version = policy_version
        self._completions = completions
        self._closed = False

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        """The completion of the request's prompt, cut at `max_new_tokens` (finish reason `length`).

        Raises:
            DataError: the file has no completion for this prompt; names it.
            RolloutError: a closed engine.
        """
        del token_ids
        if self._closed:
            raise RolloutError(f"request {request_id}: the engine is closed")
        prompt_id = prompt_id_of(request_id)
        whole = self._completions.get(prompt_id)
        if whole is None or len(whole) == 0:
            raise DataError(
                f"prompt {prompt_id}: no completion in its file, and the `dataset` engine answers with nothing else; "
                "add the field `completion` to the row, or choose another rollout.engine"
            )
        tokens = np.asarray(whole, dtype=np.int32)[: params.max_new_tokens]
        return Completion(
            token_ids=tokens,
            logprobs=np.full(len(tokens), np.nan, dtype=np.float32),  # nobody sampled them
            finish_reason="stop" if len(tokens) == len(whole) else "length",
            policy_version=self.policy_version,
        )

    async def pause(self) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing waits."""

    async def update_weights(self, bucket: WeightBucket) -> None:
        """Note the version of a whole update."""
        if bucket.is_last:
            self.policy_version = bucket.version

    async def set_memory(self, *, released: bool) -> None:
        """Nothing to give back."""
        del released

    def close(self) -> None:
        """Refuse further requests."""
        self._closed = True
