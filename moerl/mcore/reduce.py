"""Metrics of every rank, merged by the law each one carries; the same on all ranks afterwards."""

from __future__ import annotations

import json

import numpy as np

from moerl.mcore.parallel import ParallelState
from moerl.mcore.wire import gather_bytes
from moerl.metrics import (
    Correlation,
    EffectiveSize,
    Last,
    Max,
    Mean,
    Metric,
    Metrics,
    Min,
    Quantile,
    Sum,
    merge_into,
)

LAWS: dict[str, type] = {law.__name__: law for law in (Mean, Sum, Max, Min, Last, EffectiveSize, Correlation)}
MAX_NUMBERS = 16384
"""Of a quantile, from one rank: beyond it, as many order statistics at even distances, each for several numbers."""


def merge_over_ranks(metrics: Metrics, parallel: ParallelState) -> Metrics:
    """Merge the metrics of all data-parallel ranks.

    Ranks of one tensor, context or pipeline group report on the same tokens, so one of them speaks for its data rank:
    the first tensor and context rank of the last stage, where the objective is. Names may differ between ranks (a
    micro-batch without a live token reports less).
    """
    if parallel.world_size == 1:
        return metrics
    speaks = parallel.is_last_stage and parallel.tp.rank == parallel.cp.rank == 0
    mine = to_wire(metrics) if speaks else b""
    merged: Metrics = {}
    for text in gather_bytes(mine):
        if text:
            merge_into(merged, from_wire(text))
    return merged


def to_wire(metrics: Metrics) -> bytes:
    """JSON: name -> law and its numbers. A quantile keeps at most `MAX_NUMBERS`, and how many each stands for."""
    return json.dumps({name: [type(metric).__name__, *_numbers(metric)] for name, metric in metrics.items()}).encode()


def from_wire(text: bytes) -> Metrics:
    """Inverse of `to_wire`."""
    return {name: _metric(*parts) for name, parts in json.loads(text).items()}


def _numbers(metric: Metric) -> list[float]:
    if isinstance(metric, Quantile):
        thin = metric.thinned(MAX_NUMBERS)
        return [metric.level, *(thin.weights or (1.0,)), *thin.numbers().tolist()]
    return [float(getattr(metric, slot)) for slot in type(metric).__slots__]  # pyright: ignore[reportAttributeAccessIssue] every law is a slotted dataclass


def _metric(law: str, *numbers: float) -> Metric:
    if law == Quantile.__name__:
        level, weight, *rest = numbers
        return Quantile(level, (np.array(rest),), () if weight == 1 else (weight,))
    return LAWS[law](*numbers)
