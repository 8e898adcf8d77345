"""Trajectories as JSON values and arrays, and back bit for bit: what a checkpoint holds of a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moerl.errors import CheckpointError
from moerl.types import Candidate, LocalArray, Support, TopLogprobs, Trajectory


def saved_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Dictionaries, lists, numbers, strings and arrays; numbers that may be NaN are arrays. Routes are opened."""
    t = trajectory
    return {
        "token_ids": t.token_ids,
        "loss_mask": t.loss_mask,
        "rollout_logprobs": t.rollout_logprobs,
        "temperature": t.temperature,
        "finish_reason": t.finish_reason,
        "version_spans": [list(span) for span in t.version_spans],
        "routed_experts": None if t.routed_experts is None else t.routed_experts.open(),
        "has_route": t.has_route,
        "support": None if t.support is None else [t.support.ids, t.support.offsets],
        "top_logprobs": None if t.top_logprobs is None else [t.top_logprobs.ids, t.top_logprobs.logprobs],
        "response_text": t.response_text,
        "status": t.status,
        "error": t.error,
        "reward_components": _saved_numbers(t.reward_components),
        "reward": np.array([t.reward], dtype=np.float64),
        "metrics": _saved_numbers(t.metrics),
        "candidates": [[one.text, one.weight] for one in t.candidates],
    }


def loaded_trajectory(state: Mapping[str, Any]) -> Trajectory:
    """What `saved_trajectory` was given; its routes are in memory.

    Raises:
        CheckpointError: something is missing or not what it was.
    """
    try:
        routes, support, top = state["routed_experts"], state["support"], state["top_logprobs"]
        return Trajectory(
            token_ids=state["token_ids"],
            loss_mask=state["loss_mask"],
            rollout_logprobs=state["rollout_logprobs"],
            temperature=float(state["temperature"]),
            finish_reason=state["finish_reason"],
            version_spans=tuple((int(start), int(end), int(version)) for start, end, version in state["version_spans"]),
            routed_experts=None if routes is None else LocalArray(routes),
            has_route=state["has_route"],
            support=None if support is None else Support(*support),
            top_logprobs=None if top is None else TopLogprobs(*top),
            response_text=state["response_text"],
            status=state["status"],
            error=state["error"],
            reward_components=_numbers(state["reward_components"]),
            reward=float(state["reward"][0]),
            metrics=_numbers(state["metrics"]),
            candidates=tuple(Candidate(text, float(weight)) for text, weight in state["candidates"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"a rollout of the checkpoint's buffer is damaged ({type(error).__name__}: {error}); use another checkpoint"
        ) from error


def _saved_numbers(values: Mapping[str, float]) -> list[Any]:
    return [list(values), np.array(list(values.values()), dtype=np.float64)]


def _numbers(saved: list[Any]) -> dict[str, float]:
    names, values = saved
    return {name: float(value) for name, value in zip(names, values, strict=True)}
