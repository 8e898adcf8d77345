"""The "model" of a fake server: tokens, logprobs and routes as pure functions, so that a test can say what must come.

A token is a function of the weights' label, the request's key and its position in the text. The key is the seed less
the prompt's length, so that a request that was cut off and goes on with `seed + tokens so far` draws the same tokens as
one that was not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from moerl.rollout.fake_engine.settings import FakeEngineConfig

_MASK = (1 << 64) - 1


def mixed(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64: the finaliser of SplitMix64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=1024)
def label_hash(label: str, seed: int) -> int:
    """Of a weight label in one model."""
    return int.from_bytes(hashlib.blake2b(f"{seed}|{label}".encode(), digest_size=8).digest(), "big")


class FakeModel:
    """Draws whole stretches of an answer at once."""

    def __init__(self, cfg: FakeEngineConfig) -> None:
        self.cfg = cfg

    def _weights(self, label: str) -> int:
        return label_hash("" if self.cfg.is_constant else label, self.cfg.seed)

    def key(self, seed: int, prompt_length: int) -> int:
        """Of a request, the same after it was resumed."""
        return (seed - prompt_length) & _MASK

    def answer_length(self, key: int, prompt_length: int) -> int:
        """Tokens of this answer, the end token included; at least 1."""
        quantile = float(mixed(np.array([key ^ 0x5DEECE66D], dtype=np.uint64))[0] >> np.uint64(11)) / (1 << 53)
        return max(1, self.cfg.length(quantile) - prompt_length)

    def tokens(self, label: str, key: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [count] int32 and logprobs [count] float64 at positions `start` on; none is the end token."""
        positions = np.arange(start, start + count, dtype=np.uint64)
        drawn = mixed(positions ^ np.uint64(key ^ self._weights(label)))
        ids = (drawn % np.uint64(self.cfg.vocab_size - 1)).astype(np.int32)
        ids[ids >= self.cfg.eos_token_id] += 1
        fraction = (drawn >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return ids, -3.0 * fraction - 1e-3

    def text(self, token_ids: Sequence[int]) -> str:
        """A token is written as its number and a blank."""
        return "".join(f"{token} " for token in token_ids)

    def routes(self, label: str, token_ids: np.ndarray, start: int) -> np.ndarray:
        """[rows, layers, k] int32 of the forwards of `token_ids`, which stand at positions `start` on."""
        cfg = self.cfg
        if not len(token_ids):
            return np.zeros((0, cfg.num_layers, cfg.experts_per_token), dtype=np.int32)
        positions = np.arange(start, start + len(token_ids), dtype=np.uint64)
        rows = mixed(positions ^ np.uint64(self._weights(label)) ^ (token_ids.astype(np.uint64) << np.uint64(40)))
        first = mixed(rows[:, None] + np.arange(cfg.num_layers, dtype=np.uint64)) % np.uint64(cfg.num_experts)
        ids = (first[:, :, None] + np.arange(cfg.experts_per_token, dtype=np.uint64)) % np.uint64(cfg.num_experts)
        routes = ids.astype(np.int32)
        routes[:, : cfg.dense_layers] = 0
        return routes
