"""What ranks tell one another of metrics: a quantile over ranks of unlike size is that of all numbers together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.mcore.reduce import MAX_NUMBERS, from_wire, to_wire
from moerl.metrics import Correlation, EffectiveSize, Last, Max, Mean, Min, Quantile, Sum, merge_into, to_floats


def over_ranks(ranks, level):
    """The reduced value after every rank's numbers went over the wire."""
    merged = {}
    for numbers in ranks:
        merge_into(merged, from_wire(to_wire({"q": Quantile(level, (torch.from_numpy(numbers),))})))
    return merged


@pytest.mark.parametrize("level", [0.01, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("sizes", [(200_000, 1_000), (1_000, 90_000, 7), (MAX_NUMBERS + 1, 3 * MAX_NUMBERS)])
def test_a_quantile_over_ranks_of_unlike_size_is_that_of_the_pooled_numbers(sizes, level):
    rng = np.random.default_rng(5)
    ranks = [rng.normal(3.0 * place, 1.0 + place, size) for place, size in enumerate(sizes)]
    low, high = np.quantile(np.concatenate(ranks), [level - 1 / MAX_NUMBERS, level + 1 / MAX_NUMBERS])
    assert low <= to_floats(over_ranks(ranks, level))["q"] <= high


def test_numbers_that_fit_are_told_exactly():
    rng = np.random.default_rng(6)
    ranks = [rng.normal(size=size) for size in (MAX_NUMBERS, 5, 0, 1)]
    assert to_floats(over_ranks(ranks, 0.9))["q"] == np.quantile(np.concatenate(ranks), 0.9)


def test_what_was_merged_can_be_told_again():
    """Thinned twice, the level is off by twice as much."""
    rng = np.random.default_rng(7)
    ranks = [rng.normal(size=100_000), rng.normal(8.0, size=20_000)]
    again = from_wire(to_wire(over_ranks(ranks, 0.8)))
    low, high = np.quantile(np.concatenate(ranks), [0.8 - 2 / MAX_NUMBERS, 0.8 + 2 / MAX_NUMBERS])
    assert low <= to_floats(again)["q"] <= high


@pytest.mark.parametrize("size", [10, 2 * MAX_NUMBERS])
def test_a_number_that_is_none_is_not_lost(size):
    bad = np.arange(float(size))
    bad[3] = np.nan
    assert np.isnan(to_floats(over_ranks([bad, np.arange(2.0 * MAX_NUMBERS)], 0.5))["q"])


def test_other_laws_come_back_as_they_were():
    metrics = {
        "mean": Mean(3.0, 4.0),
        "sum": Sum(2.5),
        "max": Max(7.0),
        "min": Min(-1.0),
        "last": Last(5.0),
        "size": EffectiveSize(3.0, 5.0, 2.0),
        "correlation": Correlation(2.0, 0.5, 0.1, 3.0, 4.0, 1.0),
    }
    assert from_wire(to_wire(metrics)) == metrics
