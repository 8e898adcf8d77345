"""Metrics that carry their own law of reduction, so that an average is never averaged again.

`Mean` holds a total and a count; `Sum`, `Max`, `Min` and `Last` the obvious; `EffectiveSize` and `Correlation` the
moments they are made of, `Quantile` the numbers themselves. `merge` is associative: micro-batches, ranks and steps
combine in any order. Values may be 0-dim tensors until `to_floats`, so that nothing leaves the device
in a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

Scalar = Any
"""A float, or a 0-dim tensor that is turned into one by `to_floats`."""


class Metric(Protocol):
    """What every law offers."""

    def merge(self, other: Self) -> Self:
        """Combine two parts of the same quantity."""
        ...

    def value(self) -> float | None:
        """The reduced number, or None where there was nothing to reduce."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """Weighted mean: `total / count`."""

    total: Scalar
    count: Scalar = 1.0

    def merge(self, other: Mean) -> Mean:
        """Add totals and counts."""
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        """None when nothing was counted: a mean over no tokens is not zero."""
        count = float(self.count)
        return float(self.total) / count if count else None


@dataclass(frozen=True, slots=True)
class Sum:
    """A plain total."""

    total: Scalar

    def merge(self, other: Sum) -> Sum:
        """Add."""
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        """The total."""
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest part."""

    largest: Scalar

    def merge(self, other: Max) -> Max:
        """Keep the larger; NaN is larger than any number."""
        return self if math.isnan(float(self.largest)) or float(self.largest) >= float(other.largest) else other

    def value(self) -> float | None:
        """The largest value; None for -inf, the identity."""
        number = float(self.largest)
        return None if number == float("-inf") else number


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest part."""

    smallest: Scalar

    def merge(self, other: Min) -> Min:
        """Keep the smaller; NaN is smaller than any number."""
        return self if math.isnan(float(self.smallest)) or float(self.smallest) <= float(other.smallest) else other

    def value(self) -> float | None:
        """The smallest value; None for +inf, the identity."""
        number = float(self.smallest)
        return None if number == float("inf") else number


@dataclass(frozen=True, slots=True)
class EffectiveSize:
    """Effective sample size of weights w as a share of their number: `(sum w)^2 / (count * sum w^2)`."""

    total: Scalar
    squares: Scalar
    count: Scalar

    def merge(self, other: EffectiveSize) -> EffectiveSize:
        """Add the moments."""
        return EffectiveSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> float | None:
        """In (0, 1]; None without weights."""
        divisor = float(self.count) * float(self.squares)
        return float(self.total) ** 2 / divisor if divisor else None


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's correlation of pairs (a, b), from their number, means and central sums of products."""

    count: Scalar
    mean_a: Scalar
    mean_b: Scalar
    aa: Scalar
    """Sum of `(a - mean_a)^2`."""
    bb: Scalar
    ab: Scalar

    def merge(self, other: Correlation) -> Correlation:
        """Pool two samples (Chan, Golub and LeVeque 1983: no cancellation of raw moments)."""
        count = float(self.count) + float(other.count)
        if not count:
            return self
        share = float(other.count) / count
        da, db = float(other.mean_a) - float(self.mean_a), float(other.mean_b) - float(self.mean_b)
        between = float(self.count) * share
        return Correlation(
            count,
            float(self.mean_a) + share * da,
            float(self.mean_b) + share * db,
            float(self.aa) + float(other.aa) + between * da * da,
            float(self.bb) + float(other.bb) + between * db * db,
            float(self.ab) + float(other.ab) + between * da * db,
        )

    def value(self) -> float | None:
        """In [-1, 1]; None where one side does not vary."""
        scale = (float(self.aa) * float(self.bb)) ** 0.5
        return float(self.ab) / scale if scale > 0 else None


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile (linear interpolation) of all numbers together, which it therefore keeps until it is read."""

    level: float
    """In [0, 1]."""
    parts: tuple[Any, ...]
    """Vectors: tensors on any device, or numpy arrays."""
    weights: tuple[float, ...] = ()
    """How many numbers each entry of a part stands for; (): 1 in all parts."""

    def merge(self, other: Quantile) -> Quantile:
        """Keep the numbers of both."""
        weights = self._part_weights() + other._part_weights() if self.weights or other.weights else ()
        return Quantile(self.level, self.parts + other.parts, weights)

    def numbers(self) -> np.ndarray:
        """All of them, float64."""
        arrays = [np.asarray(part.cpu() if hasattr(part, "cpu") else part, dtype=np.float64) for part in self.parts]
        return np.concatenate(arrays) if arrays else np.empty(0)

    def at(self, levels: Any) -> np.ndarray:
        """The quantiles at `levels`, of at least one number.

        An entry that stands for w numbers lies in the middle of their w places; between entries it is linear.
        """
        numbers = self.numbers()
        if np.isnan(numbers).any():
            return np.full(np.shape(levels), np.nan)
        if not self.weights and np.ndim(levels) == 0:
            return np.quantile(numbers, levels)
        if not self.weights:  # np.quantile looks for the place of each of the levels, which takes far longer
            return np.interp(np.asarray(levels) * (len(numbers) - 1), np.arange(len(numbers)), np.sort(numbers))
        order = np.argsort(numbers, kind="stable")
        weights = np.repeat(self.weights, [len(part) for part in self.parts])[order]
        places = weights.cumsum() - (weights + 1) / 2
        return np.interp(np.asarray(levels) * (weights.sum() - 1), places, numbers[order])

    def thinned(self, count: int) -> Quantile:
        """At most `count` entries: where there are more, the quantiles at the middles of as many equal shares.

        The quantile of what is merged from thinned parts is that of all numbers at a level within 1 / count.
        """
        size = sum(w * len(part) for w, part in zip(self._part_weights(), self.parts, strict=True))
        is_even = len(self.parts) <= 1 or not self.weights
        if is_even and sum(len(part) for part in self.parts) <= count:
            return Quantile(self.level, (self.numbers(),), self.weights)
        weight = size / count
        places = weight * (np.arange(count) + 0.5) - 0.5
        return Quantile(self.level, (self.at(places / (size - 1)),), (weight,))

    def value(self) -> float | None:
        """None without numbers."""
        return float(self.at(self.level)) if any(len(part) for part in self.parts) else None

    def _part_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.parts)


@dataclass(frozen=True, slots=True)
class Last:
    """The most recent value; only for what every rank agrees on (a learning rate, a version)."""

    last: Scalar

    def merge(self, other: Last) -> Last:
        """Keep the later one."""
        return other

    def value(self) -> float | None:
        """The value."""
        return float(self.last)


Metrics = dict[str, Metric]
"""Flat metric names to laws."""


def merge_into(target: Metrics, new: Mapping[str, Metric]) -> Metrics:
    """Merge `new` into `target` in place, name by name, and return it.

    Raises:
        TypeError: the same name came with two laws.
    """
    for name, metric in new.items():
        seen = target.get(name)
        if seen is not None and type(seen) is not type(metric):
            raise TypeError(f"metric {name!r} came as {type(seen).__name__} and as {type(metric).__name__}")
        target[name] = metric if seen is None else seen.merge(metric)
    return target


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Reduced values by name, without those that had nothing to reduce."""
    values = {name: metric.value() for name, metric in metrics.items()}
    return {name: value for name, value in values.items() if value is not None}


def masked_mean(values: Any, mask: Any) -> Mean:
    """Mean of `values` [t] over the tokens where `mask` [t] is True; what is under the mask is never read (0 * inf)."""
    kept = values.detach()[mask]
    return Mean(kept.double().sum(), mask.sum().double())
