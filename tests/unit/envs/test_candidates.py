"""Candidates with stated probabilities: what is read, what is dropped and counted, what no text can break."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.envs.candidates import FAULTS, Markers, entropy, parse_candidates
from moerl.errors import ConfigError

TAGS = Markers("<text>", "</text>", "<probability>", "</probability>")
SIGNS = Markers("[", "]", "(", ")")


def one(answer, probability):
    return f"<response><text>{answer}</text><probability>{probability}</probability></response>"


def parse(text, expected=5, markers=TAGS):
    return parse_candidates(text, markers, expected)


def weights(parsed):
    return {candidate.text: candidate.weight for candidate in parsed.candidates}


def test_a_good_response_is_read_and_renormalised():
    parsed = parse("Here:\n" + one(" a b \n", "0.3") + one("c", ".1") + "bye", expected=2)
    assert weights(parsed) == {"a b": pytest.approx(0.75), "c": pytest.approx(0.25)}
    assert parsed.stated == (0.3, 0.1)
    assert parsed.faults == {}


def test_markers_of_the_other_kind_inside_an_answer_are_text():
    parsed = parse("[(1+2)(3)](0.5)[x](0.5)", 2, SIGNS)
    assert weights(parsed) == {"(1+2)(3)": 0.5, "x": 0.5}


@pytest.mark.parametrize(
    ("written", "share"),
    [("30%", 0.3), ("30 %", 0.3), (" 3e-1 ", 0.3), ("+0.3", 0.3), ("0", 0.0), ("-0", 0.0), ("1e-999", 0.0), ("1", 1.0)],
)
def test_ways_to_write_a_probability(written, share):
    parsed = parse(one("a", written) + one("b", "0.3"), 2)
    assert parsed.stated == (pytest.approx(share), 0.3)
    assert weights(parsed)["a"] == pytest.approx(share / (share + 0.3))
    assert parsed.faults == {}


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (one("x", "-0.2"), "negative"),
        (one("x", "nan"), "not_finite"),
        (one("x", "-inf"), "not_finite"),
        (one("x", "1e999"), "not_finite"),
        (one("x", "likely"), "not_a_number"),
        (one("x", "0.3.1"), "not_a_number"),
        (one("x", "0" * 70), "not_a_number"),
        (one("x", "٣"), "not_a_number"),
        (one("x", " "), "missing_probability"),
        ("<text>x</text>", "missing_probability"),
        (one(" ", "0.2"), "empty"),
        ("<text>x", "unterminated"),
        ("<text>x</text><probability>0.2", "unterminated"),
    ],
)
def test_a_bad_candidate_is_dropped_and_counted_and_the_others_stay(bad, kind):
    parsed = parse(bad + one("a", "0.5") + one("b", "0.5"), 2)
    assert weights(parsed) == {"a": 0.5, "b": 0.5}
    assert parsed.faults == {kind: 1}
    alone = parse(bad)
    assert alone.candidates == ()
    assert alone.faults == {kind: 1}


def test_numbers_over_one_are_shares():
    parsed = parse(one("a", "30") + one("b", "70"), 2)
    assert weights(parsed) == {"a": pytest.approx(0.3), "b": pytest.approx(0.7)}
    assert parsed.faults == {"over_one": 2}


def test_shares_whose_sum_overflows_still_sum_to_one():
    assert weights(parse(one("a", "1e308") + one("b", "1.5e308"), 2)) == {
        "a": pytest.approx(0.4),
        "b": pytest.approx(0.6),
    }


def test_all_zero_is_uniform():
    parsed = parse(one("a", "0") + one("b", "0%"), 2)
    assert weights(parsed) == {"a": 0.5, "b": 0.5}
    assert parsed.faults == {"zero_sum": 1}


def test_equal_texts_are_one_candidate():
    parsed = parse(one("a", "0.2") + one("b", "0.5") + one(" a", "0.3"), 3)
    assert weights(parsed) == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}
    assert parsed.faults == {"duplicate": 1}


def test_too_few_and_too_many():
    assert parse(one("a", "0.2"), 3).faults == {"too_few": 2}
    parsed = parse(one("a", "0.2") + one("b", "0.2") + one("c", "0.6"), 2)
    assert weights(parsed) == {"a": 0.5, "b": 0.5}
    assert parsed.faults == {"too_many": 1}
    assert parse("no marker").faults == {}


PIECES = st.sampled_from([*TAGS.all, "0.3", "30%", "-1", "nan", "1e999", "1e308", "0", " ", "a", "%", "<", "text>"])


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)), st.integers(2, 6))
def test_no_text_breaks_it(text, expected):
    parsed = parse(text, expected)
    assert set(parsed.faults) <= set(FAULTS)
    assert all(count > 0 for count in parsed.faults.values())
    assert len(parsed.candidates) <= len(parsed.stated) <= expected
    assert len({c.text for c in parsed.candidates}) == len(parsed.candidates)
    if parsed.candidates:
        assert math.fsum(c.weight for c in parsed.candidates) == pytest.approx(1.0, abs=1e-12)
        assert all(c.weight >= 0.0 and c.text.strip() for c in parsed.candidates)
        assert -1e-12 <= entropy([c.weight for c in parsed.candidates]) <= math.log(expected) + 1e-12


@pytest.mark.parametrize(
    "piece",
    [
        "<text>",
        "<text></text>",
        "<text>a</text><probability>",
        "<",
        "</text></probability>",
        "<text>a</text><probability>1",
    ],
)
def test_long_hostile_text_comes_to_an_end(piece):
    """A million characters and more: a reader that looks back at every piece would not live to see it."""
    parsed = parse(piece * 200_000)
    assert set(parsed.faults) <= set(FAULTS)
    assert len(parsed.stated) <= 5


def test_entropy_is_in_nats():
    assert entropy([0.5, 0.5, 0.0]) == pytest.approx(math.log(2))
    assert entropy([1.0]) == 0.0


@pytest.mark.parametrize(
    ("markers", "message"),
    [
        (Markers("", "]", "(", ")"), "text_open is ''"),
        (Markers("[", "]", "(", "  "), "probability_close is '  '"),
        (Markers("[", "[", "(", ")"), "no marker may be part of another"),
        (Markers("[", "]", "[[", ")"), r"probability_open='\[\[' holds text_open='\['"),
    ],
)
def test_markers_that_cannot_be_told_apart_are_refused(markers, message):
    with pytest.raises(ConfigError, match=f"w.*{message}"):
        markers.check("w")
