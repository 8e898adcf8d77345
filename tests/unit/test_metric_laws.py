"""A metric of the parts of a batch, merged, is that of the whole batch, whatever the cut and the order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.metrics import Correlation, EffectiveSize, Max, Min, Quantile


def effective_size(a: np.ndarray, _: np.ndarray) -> EffectiveSize:
    return EffectiveSize(a.sum(), np.square(a).sum(), float(len(a)))


def correlation(a: np.ndarray, b: np.ndarray) -> Correlation:
    if not len(a):
        return Correlation(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    da, db = a - a.mean(), b - b.mean()
    return Correlation(float(len(a)), a.mean(), b.mean(), (da * da).sum(), (db * db).sum(), (da * db).sum())


def quantile(a: np.ndarray, _: np.ndarray) -> Quantile:
    return Quantile(0.9, (torch.from_numpy(a),))


@pytest.mark.parametrize(
    ("make", "oracle"),
    [
        (effective_size, lambda a, b: a.sum() ** 2 / (len(a) * (a * a).sum())),
        (correlation, lambda a, b: np.corrcoef(a, b)[0, 1]),
        (quantile, lambda a, b: np.quantile(a, 0.9)),
    ],
)
@pytest.mark.parametrize("cuts", [[], [1], [3, 3, 40], [10, 20, 30], [59]])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_parts_make_the_whole(make, oracle, cuts, is_reversed):
    rng = np.random.default_rng(len(cuts))
    a = rng.gamma(2.0, size=60)
    b = 1e6 + a + rng.normal(size=60)  # far from 0: raw moments would cancel
    parts = [make(*pair) for pair in zip(np.split(a, cuts), np.split(b, cuts), strict=True)]
    first, *rest = reversed(parts) if is_reversed else parts
    for part in rest:
        first = first.merge(part)
    assert first.value() == pytest.approx(oracle(a, b), rel=1e-9)


@pytest.mark.parametrize("make", [effective_size, correlation, quantile])
def test_nothing_has_no_value(make):
    empty = np.empty(0)
    assert make(empty, empty).merge(make(empty, empty)).value() is None


def test_one_side_that_does_not_vary_has_no_correlation():
    assert correlation(np.ones(4), np.arange(4.0)).value() is None


@pytest.mark.parametrize("law", [Max, Min])
@pytest.mark.parametrize("numbers", [(np.nan, 1.0, 2.0), (1.0, np.nan, 2.0), (1.0, 2.0, np.nan)])
def test_an_extreme_that_is_not_a_number_stays_one_in_any_order(law, numbers):
    first, second, third = map(law, numbers)
    assert np.isnan(first.merge(second).merge(third).value())
    assert np.isnan(first.merge(second.merge(third)).value())
