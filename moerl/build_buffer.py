"""Composition of the buffer between rollout and learning: ahead of training or not. Part of `build.py`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from moerl.algorithms.filtering import Filters
from moerl.build_rollout import Data, RolloutSide, is_supervised
from moerl.config.schema import RunConfig
from moerl.curriculum import Curriculum, LogVisits
from moerl.data.prompts import PromptMixture
from moerl.protocols import GroupFilter, PromptSource, Rollouts, Span
from moerl.rollout.ahead import AheadBuffer, AheadRooms
from moerl.rollout.buffer import RolloutBuffer
from moerl.rollout.collect import Collector
from moerl.rollout.described import DescribedRollouts, GroupDescriber
from moerl.rollout.plan import LongTail, PlanSettings
from moerl.rollout.resample import ResamplingCollector
from moerl.rollout.text_metrics import TextSettings, text_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Buffered:
    """The buffer, and what is wired to it."""

    rollouts: Rollouts
    source: PromptMixture
    """That it draws from."""
    published: Callable[[int], None]
    """To be told when the engines serve a version."""


def build_buffer(
    cfg: RunConfig,
    data: Data,
    side: RolloutSide,
    *,
    filters: Filters,
    log_visits: LogVisits,
    on_span: Span | None = None,
) -> Buffered:
    """The buffer, with the filters of groups and prompts inside."""
    source = PromptMixture(data.train, seed=cfg.run.seed, shuffle=cfg.data.shuffle)
    settings = TextSettings(tuple(cfg.telemetry.ngrams), tuple(cfg.telemetry.reflection_words))
    describer = GroupDescriber(partial(text_metrics, settings=settings))
    curriculum = None
    if filters.prompts or not is_supervised(cfg):  # a completion of a file neither passes nor fails
        curriculum = Curriculum(filters.prompt, source.num_prompts, cfg.data.refilter, log_visits)
    curated = source if curriculum is None else curriculum.source(source)

    def watched(inner: GroupFilter) -> GroupFilter:
        look = describer.group_filter(inner)
        return look if curriculum is None else curriculum.group_filter(look)

    published: Callable[[int], None] = _ignore
    if side.thread is None:
        rollouts = _on_policy(cfg, side, curated, filters, watched(filters.group))
    else:
        rooms = AheadRooms(
            thread=side.thread,
            source=curated,
            find=source.find,
            play=side.collector.play,
            params=side.sampling,
            group_filter=filters.group,
            observe=watched(lambda _: None),
            on_span=on_span,
        )
        rollouts = _ahead(cfg, rooms)
        published = rollouts.published
    rollouts = describer.rollouts(rollouts)
    return Buffered(rollouts if curriculum is None else curriculum.rollouts(rollouts), source, published)


def _ignore(version: int) -> None:
    """Nothing is started ahead."""
    del version


def _on_policy(
    cfg: RunConfig, side: RolloutSide, source: PromptSource, filters: Filters, group_filter: GroupFilter
) -> Rollouts:
    collector: Collector | ResamplingCollector = side.collector
    resampling = None
    if filters.resampling:
        collector = resampling = ResamplingCollector(side.collector, filters.anew, filters.resampling_rounds)
    buffer = RolloutBuffer(
        source=source,
        collector=collector,
        group_filter=group_filter,
        prompts_per_step=cfg.rollout.prompts_per_step,
        group_size=cfg.rollout.group_size,
        params=side.sampling,
        refill_rounds=cfg.algorithm.refill_rounds,
        max_error_fraction=cfg.reward.max_error_fraction,
    )
    return buffer if resampling is None else DescribedRollouts(buffer, resampling.take)


def _ahead(cfg: RunConfig, rooms: AheadRooms) -> AheadBuffer:
    if cfg.algorithm.anchor == "old" and cfg.algorithm.correction["name"] == "none":
        logger.warning(
            "rollout.max_staleness is %d with algorithm.anchor=old and no algorithm.correction: answers of older "
            "policies are trained on as if they were the present one's; algorithm.correction=tis, say, weighs them",
            cfg.rollout.max_staleness,
        )
    settings = PlanSettings(
        prompts_per_step=cfg.rollout.prompts_per_step,
        started_per_step=math.ceil(cfg.rollout.oversampling * cfg.rollout.prompts_per_step),
        max_staleness=cfg.rollout.max_staleness,
        refill_rounds=cfg.algorithm.refill_rounds,
        long_tail=cast(LongTail, cfg.rollout.long_tail),
        last_step=cfg.run.num_steps,
    )
    return AheadBuffer(
        rooms, settings, group_size=cfg.rollout.group_size, max_error_fraction=cfg.reward.max_error_fraction
    )
