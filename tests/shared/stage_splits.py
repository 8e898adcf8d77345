"""Pipelines of few layers, cut in every way that fits."""

from __future__ import annotations

import itertools

from moerl.config.stages import StageSplit


def stages(split: StageSplit, layers: int) -> list[list[int]]:
    """The layers of each stage, one by one."""
    held: list[list[int]] = [[] for _ in range(split.pipeline)]
    for layer in range(layers):
        held[split.stage_of(layer, layers)].append(layer)
    return held


def splits(layers: int) -> list[StageSplit]:
    """Every one that fits."""
    ends = (None, *range(1, layers + 1))
    every = itertools.product(range(2, 5), range(1, 4), ends, ends)
    made = [StageSplit(pipeline=p, virtual=v, first=first, last=last) for p, v, first, last in every]
    return [split for split in made if split.fits(layers)]
