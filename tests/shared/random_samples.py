"""Random answers of given lengths, with random routes, from an engine that disagrees with the learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moerl.types import LocalArray, Sample, Support, TopLogprobs

PROMPT = 4
"""Tokens of every prompt."""
LENGTHS = (9, 17, 6, 21, 12, 8, 29, 14, 11, 7, 19, 10)
"""Of the samples of a step, where a test names no others."""


def random_samples(
    rng: np.random.Generator, lengths: Sequence[int], shape: dict[str, int], *, constant: bool
) -> list[Sample]:
    """Two answers to each prompt. Every fourth token and the last of each answer have no route.

    Args:
        rng: what they are drawn from.
        lengths: tokens of each, the prompt's included.
        shape: `layers`, `experts`, `topk` and `vocab` of the model; with `likeliest`, so many tokens of the engine's
            beside every sampled one; with `support`, so many tokens in the running.
        constant: one advantage for all tokens of an answer.
    """
    made = []
    for i, length in enumerate(lengths):
        places = np.arange(length)
        mask = places >= PROMPT
        advantage = rng.normal(size=1 if constant else length).astype(np.float32)
        routes = np.sort(rng.random((length, shape["layers"], shape["experts"])).argsort(-1)[..., : shape["topk"]], -1)
        token_ids = rng.integers(2, shape["vocab"], length).astype(np.int32)
        made.append(
            Sample(
                sample_id=i,
                group_id=i // 2,
                prompt_id=f"p/{i // 2}",
                token_ids=token_ids,
                loss_mask=mask,
                rollout_logprobs=np.where(mask, rng.normal(-4, 0.4, length), 0).astype(np.float32),
                advantages=np.where(mask, advantage, 0).astype(np.float32),
                reward=float(i % 3),
                temperature=1.0 if i % 2 else 0.8,
                routed_experts=LocalArray(routes.astype(np.uint8)) if shape["layers"] else None,
                has_route=(places < length - 1) & ((places + i) % 4 != 2) if shape["layers"] else None,
                top_logprobs=_likeliest(rng, mask, shape) if "likeliest" in shape else None,
                support=_support(rng, token_ids, mask, shape) if "support" in shape else None,
            )
        )
    return made


def _likeliest(rng: np.random.Generator, mask: np.ndarray, shape: dict[str, int]) -> TopLogprobs:
    """Random ones; at every fifth token the last was not in the running."""
    width = shape["likeliest"]
    ids = rng.random((len(mask), shape["vocab"])).argsort(-1)[:, :width].astype(np.int32)
    ids[::5, -1] = -1
    ids[~mask] = -1
    logprobs = -np.sort(rng.uniform(1.5, 6, ids.shape), -1).astype(np.float32)
    return TopLogprobs(ids, np.where(ids < 0, -np.inf, logprobs).astype(np.float32))


def _support(rng: np.random.Generator, token_ids: np.ndarray, mask: np.ndarray, shape: dict[str, int]) -> Support:
    """The sampled token and random others; at every fifth token the whole vocabulary was in the running."""
    order = rng.random((len(mask), shape["vocab"]))
    order[np.arange(len(mask)), token_ids] = -1
    is_cut = mask & (np.arange(len(mask)) % 5 != 0)
    ids = order.argsort(-1)[is_cut, : shape["support"]].astype(np.int32)
    return Support(ids.reshape(-1), np.concatenate(([0], np.cumsum(is_cut * shape["support"]))))
