"""Re-filtering every N steps: what is left out, what comes back, and the same after a checkpoint."""

from __future__ import annotations

import json

import pytest

from moerl.algorithms.pass_rate import PassRates
from moerl.config.schema import RefilterSection
from moerl.errors import CheckpointError
from moerl.metrics import to_floats
from moerl.refilter import Refilter

NAMES = ("easy", "good", "hard", "new")


def kept(refilter):
    return [name for name in NAMES if refilter.keeps(name)]


def visited(rates, step, **passed):
    for name, number in passed.items():
        rates.visit(name, 8, number, step)


def test_off_by_default():
    rates, refilter = PassRates(), Refilter(RefilterSection())
    visited(rates, 1, easy=8, hard=0)
    assert [refilter.at(step, rates) for step in range(1, 5)] == [{}] * 4
    assert kept(refilter) == list(NAMES)


def test_out_of_the_band_at_a_multiple_and_not_between():
    rates, refilter = PassRates(), Refilter(RefilterSection(every_steps=3))
    visited(rates, 1, easy=8, good=4, hard=0)
    assert to_floats(refilter.at(2, rates)) == {"data/refilter_left_out": 0.0}
    assert kept(refilter) == list(NAMES)
    assert to_floats(refilter.at(3, rates)) == {
        "data/refilter_dropped": 2.0,
        "data/refilter_returned": 0.0,
        "data/refilter_left_out": 2.0,
    }
    assert kept(refilter) == ["good", "new"]
    visited(rates, 4, good=8)
    assert to_floats(refilter.at(4, rates)) == {"data/refilter_left_out": 2.0}
    assert kept(refilter) == ["good", "new"]


@pytest.mark.parametrize(("passed", "is_kept"), [(1, False), (2, True), (6, True), (7, False)])
def test_the_band_has_its_ends(passed, is_kept):
    rates, refilter = PassRates(), Refilter(RefilterSection(every_steps=1, low=0.25, high=0.75))
    visited(rates, 1, good=passed)
    refilter.at(1, rates)
    assert refilter.keeps("good") is is_kept


def test_only_answers_since_the_last_time_count_pooled_over_visits():
    rates, refilter = PassRates(), Refilter(RefilterSection(every_steps=2, low=0.25, high=0.75))
    visited(rates, 1, good=4)
    refilter.at(2, rates)
    visited(rates, 2, good=8)  # of all answers since step 1: 12 of 16; since the last time: all
    refilter.at(4, rates)
    assert not refilter.keeps("good")
    rates, refilter = PassRates(), Refilter(RefilterSection(every_steps=2, low=0.25, high=0.75))
    visited(rates, 1, good=8)
    visited(rates, 2, good=2)  # 10 of 16, though the one visit was above and the other in the band
    refilter.at(2, rates)
    assert refilter.keeps("good")


def test_who_was_left_out_returns_after_so_many_decisions_or_never():
    for return_after, expected in ((1, [0, 1]), (2, [0, 0, 1]), (None, [0, 0, 0, 0, 0])):
        rates, refilter = PassRates(), Refilter(RefilterSection(every_steps=2, return_after=return_after))
        visited(rates, 1, easy=8)
        found = []
        for step in range(2, 2 + 2 * len(expected), 2):
            refilter.at(step, rates)
            found.append(int(refilter.keeps("easy")))
        assert found == expected
    visited(rates, 12, easy=4)


def test_a_prompt_that_returned_is_judged_by_its_new_answers():
    rates, refilter = PassRates(), Refilter(RefilterSection(every_steps=1, return_after=1))
    visited(rates, 1, hard=0)
    refilter.at(1, rates)
    returned = to_floats(refilter.at(2, rates))
    assert returned["data/refilter_returned"] == 1.0
    visited(rates, 3, hard=4)
    refilter.at(3, rates)
    assert refilter.keeps("hard")


def test_goes_through_a_checkpoint():
    rule = RefilterSection(every_steps=2, return_after=2)
    rates, refilter = PassRates(), Refilter(rule)
    visited(rates, 1, easy=8, good=4)
    refilter.at(2, rates)
    refilter.at(4, rates)
    again = Refilter(rule)
    again.load_state_dict(json.loads(json.dumps(refilter.state_dict())))
    assert again.state_dict() == refilter.state_dict()
    for step in (5, 6, 8):
        assert to_floats(again.at(step, rates)) == to_floats(refilter.at(step, rates))
        assert kept(again) == kept(refilter)
    for damaged in ({}, {"left_out": [], "counted": {}}, {"left_out": {}, "counted": {"a": [1]}}):
        with pytest.raises(CheckpointError, match=r"data\.refilter"):
            Refilter(rule).load_state_dict(damaged)
