"""A trajectory in a checkpoint is the same afterwards, field by field and bit by bit."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from moerl.array_state import join_arrays, load_arrays, save_arrays, split_arrays
from moerl.errors import CheckpointError
from moerl.rollout.saved import loaded_trajectory, saved_trajectory
from moerl.types import ArrayRef, Candidate, LocalArray, Support, TopLogprobs, Trajectory

FULL = Trajectory(
    token_ids=np.array([5, 6, 7], dtype=np.int32),
    loss_mask=np.array([False, True, True]),
    rollout_logprobs=np.array([0.0, -0.1, np.nan], dtype=np.float32),
    temperature=0.7,
    finish_reason="length",
    version_spans=((1, 2, 3), (2, 3, 4)),
    routed_experts=LocalArray(np.arange(12, dtype=np.uint8).reshape(3, 2, 2)),
    has_route=np.array([True, True, False]),
    support=Support(np.array([1, 2], dtype=np.int32), np.array([0, 0, 1, 2], dtype=np.int64)),
    top_logprobs=TopLogprobs(np.full((3, 2), -1, dtype=np.int32), np.full((3, 2), -np.inf, dtype=np.float32)),
    response_text='a "text" \u2028 with \ud83d alone',
    status="error",
    error="TimeoutError: no end",
    reward_components={"a": 0.1, "b": float("inf")},
    reward=float("nan"),
    metrics={"turns": 3.0},
    candidates=(Candidate("x", 0.25), Candidate("y", 0.75)),
)
BARE = Trajectory(
    token_ids=np.zeros(0, dtype=np.int32),
    loss_mask=np.zeros(0, dtype=bool),
    rollout_logprobs=np.zeros(0, dtype=np.float32),
    temperature=1.0,
    finish_reason="abort",
    version_spans=(),
)


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, LocalArray):
        return same(a.open(), b.open())
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return a == b


@pytest.mark.parametrize("trajectory", [FULL, BARE], ids=["full", "bare"])
def test_every_field_comes_back_through_files(tmp_path, trajectory):
    text, arrays = split_arrays({"one": saved_trajectory(trajectory)})
    save_arrays(arrays, tmp_path / "x.safetensors")
    state = join_arrays(text, load_arrays(tmp_path / "x.safetensors"))
    again = loaded_trajectory(state["one"])
    for field in dataclasses.fields(Trajectory):
        assert same(getattr(trajectory, field.name), getattr(again, field.name)), field.name
    assert set(saved_trajectory(trajectory)) == {field.name for field in dataclasses.fields(Trajectory)}


def test_the_full_example_is_full():
    empty = (None, (), {}, "", "ok")
    left_out = [f.name for f in dataclasses.fields(Trajectory) if any(getattr(FULL, f.name) is e for e in empty)]
    assert left_out == []
    assert hasattr(ArrayRef, "open")


def test_damage_is_told():
    state = saved_trajectory(FULL)
    del state["reward"]
    with pytest.raises(CheckpointError, match="buffer is damaged \\(KeyError: 'reward'\\); use another checkpoint"):
        loaded_trajectory(state)


def test_state_without_arrays_makes_no_file_and_plain_json(tmp_path):
    text, arrays = split_arrays({"a": [1, {"b": None}], "c": (2.5, "x")})
    assert text == '{"a": [1, {"b": null}], "c": [2.5, "x"]}'
    save_arrays(arrays, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
    assert join_arrays(text, load_arrays(tmp_path / "x.safetensors")) == {"a": [1, {"b": None}], "c": [2.5, "x"]}


def test_arrays_that_are_missing_or_damaged_are_told(tmp_path):
    text, _ = split_arrays({"a": np.zeros(3)})
    with pytest.raises(CheckpointError, match="lacks the array '000000'"):
        join_arrays(text, {})
    (tmp_path / "x.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(CheckpointError, match=r"x.safetensors is damaged .*; use another checkpoint"):
        load_arrays(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="Out of range"):
        split_arrays({"a": float("nan")})
