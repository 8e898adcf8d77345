"""Metrics that carry their own law of reduction, so that an average is never averaged again.

`Mean` holds a total and a count; `Sum`, `Max`, `Min` and `Last` the obvious. `merge` is associative: micro-batches,
ranks and steps combine in any order. Values may be 0-dim tensors until `to_floats`, so that nothing leaves the device
in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

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
        """Keep the larger."""
        return self if float(self.largest) >= float(other.largest) else other

    def value(self) -> float | None:
        """The largest value; None for -inf, the identity."""
        number = float(self.largest)
        return None if number == float("-inf") else number


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest part."""

    smallest: Scalar

    def merge(self, other: Min) -> Min:
        """Keep the smaller."""
        return self if float(self.smallest) <= float(other.smallest) else other

    def value(self) -> float | None:
        """The smallest value; None for +inf, the identity."""
        number = float(self.smallest)
        return None if number == float("inf") else number


@dataclass(frozen=True, slots=True)
class Last:
    """The most recent value; only for what every rank agrees on (a learning rate, a version, an exact quantile)."""

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
