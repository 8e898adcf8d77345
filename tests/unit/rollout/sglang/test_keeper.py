"""The key is masked in a server's log, however its output is cut into pieces."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.rollout.sglang import keeper


def masked(pieces, secret):
    reader, writer = os.pipe()
    copy = keeper.Masked(writer, secret)
    for piece in pieces:
        copy.feed(piece)
    copy.close()
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        return file.read(), copy.is_fatal


@given(
    st.lists(st.sampled_from([b"secret", b"sec", b"ret", b"\n", b"x", b"a line\n", b"\xff"]), max_size=30),
    st.lists(st.integers(0, 150), max_size=10),
)
def test_the_secret_is_masked_wherever_the_output_is_cut(words, cuts):
    text = b"".join(words)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert masked(pieces, "secret")[0] == text.replace(b"secret", keeper.MASK)


def test_without_a_secret_nothing_changes():
    assert masked([b"a\nb"], "")[0] == b"a\nb"


@pytest.mark.parametrize("words", keeper.FATAL)
def test_words_of_a_death_are_seen_across_pieces(words):
    half = len(words) // 2
    assert masked([b"[time] " + words[:half], words[half:] + b" and so on\n"], "s")[1]
    assert not masked([b"all is well\n"], "s")[1]


def test_a_line_without_an_end_is_written_all_the_same(monkeypatch):
    monkeypatch.setattr(keeper, "MAX_LINE_BYTES", 10)
    assert masked([b"x" * 11], "s") == (b"x" * 11 + b"\n", False)
