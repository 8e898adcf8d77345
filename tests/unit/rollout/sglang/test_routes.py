"""Routes on the wire, and those of several turns as one."""

from __future__ import annotations

import numpy as np
import pytest
from fake_servers import LAYOUT
from hypothesis import given
from hypothesis import strategies as st

from moerl.errors import RolloutError
from moerl.rollout.engine import RouteLayout
from moerl.rollout.fake_engine.model import FakeModel
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang import routes
from moerl.rollout.sglang.routes import decode_routes, encode_routes, join_routes


def test_zero_rows_and_unknown_experts_are_no_routes():
    rows = FakeModel(FakeEngineConfig()).routes("default", np.arange(6), 0)
    rows[-1] = 0
    with pytest.raises(RolloutError, match="one expert twice for 1 of 6 rows, the first of them row 5"):
        decode_routes(encode_routes(rows), LAYOUT, rows=6)
    rows[-1] = 8
    with pytest.raises(RolloutError, match="ids from 0 to 8, but the model has experts 0 to 7"):
        decode_routes(encode_routes(rows), LAYOUT, rows=6)
    rows[-1] = -1
    with pytest.raises(RolloutError, match="ids from -1"):
        decode_routes(encode_routes(rows), LAYOUT, rows=6)


@pytest.mark.parametrize("is_there", [True, False], ids=["pybase64", "binascii"])
@pytest.mark.parametrize(
    "spoil", [lambda t: t[:-1], lambda t: t + "A", lambda t: "*" + t[1:], lambda t: t[:8] + "\n" + t[8:]]
)
def test_text_that_is_not_base64_to_the_last_character_is_no_routes(spoil, is_there, monkeypatch):
    if is_there:
        pytest.importorskip("pybase64", reason="pybase64 is not installed: run tools/setup.py again")
    else:
        monkeypatch.setattr(routes, "b64decode", None)
    rows = FakeModel(FakeEngineConfig()).routes("default", np.arange(5), 0)
    text = encode_routes(rows)
    np.testing.assert_array_equal(decode_routes(text, LAYOUT, rows=5), rows)
    with pytest.raises(RolloutError, match=r"no base64|rows of 3 layers"):
        decode_routes(spoil(text), LAYOUT, rows=5)


def test_dense_layers_are_left_out_and_wide_models_take_two_bytes():
    rows = np.zeros((2, 3, 2), dtype=np.int32)
    rows[:, 1:] = [[300, 2], [5, 299]]
    got = decode_routes(encode_routes(rows), RouteLayout(3, (1, 2), 2, 384), rows=2)
    assert got.dtype == np.int16
    np.testing.assert_array_equal(got, rows[:, 1:])


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 4), st.integers(4, 400), st.integers(0, 2**32 - 1))
def test_routes_survive_the_wire(rows, layers, k, experts, seed):
    layout = RouteLayout(layers, tuple(range(layers)), k, experts)
    drawn = np.random.default_rng(seed).random((rows, layers, experts)).argsort(axis=-1)[..., :k]
    got = decode_routes(encode_routes(drawn), layout, rows=rows)
    assert got.dtype == (np.uint8 if experts <= 256 else np.int16)
    np.testing.assert_array_equal(got, drawn)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 5), st.booleans())
def test_turns_joined_are_the_routes_of_the_whole_text(turns, prompt, from_start):
    """Every request lacks the row of its last token; the next turn, which runs it, brings it (pitfall 3)."""
    total = prompt + sum(turns)
    whole = np.random.default_rng(total).integers(0, 8, (total - 1, 3, 2))
    pieces, length, start = [], prompt, 0
    for tokens in turns:
        length += tokens
        pieces.append((start, whole[start : length - 1]))
        start = 0 if from_start else length - 1
    np.testing.assert_array_equal(join_routes(pieces), whole)


def test_a_gap_between_turns_is_an_error():
    rows = np.zeros((4, 3, 2))
    with pytest.raises(RolloutError, match="rows 4 to 5 came with no request"):
        join_routes([(0, rows), (6, rows)])


def test_rows_that_are_there_are_kept_as_the_sampling_policy_made_them():
    joined = join_routes([(0, np.full((4, 1, 1), 1)), (0, np.full((9, 1, 1), 2))])
    assert joined[:, 0, 0].tolist() == [1] * 4 + [2] * 5
