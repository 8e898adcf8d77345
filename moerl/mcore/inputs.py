"""From a scored micro-batch to `LossInputs`, and from score results back into the step's batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moerl.algorithms.types import LossInputs
from moerl.errors import ConfigError
from moerl.mcore.step import TokenScores
from moerl.types import MicroBatch, StepBatch, join_sampled

FILLED = frozenset(
    {
        "old_logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "entropy",
        "old_entropy",
        "router_shift",
        "rewards",
        "group_ids",
        "topk_logprobs",
        "rollout_topk",
    }
)
"""Optional fields of `LossInputs` that this learner can fill; values need a critic."""


def loss_inputs(
    batch: MicroBatch, scores: TokenScores, needs: frozenset[str], *, router_shift: Tensor | None = None
) -> LossInputs:
    """What the objective sees of one micro-batch; old logprobs that no score pass filled are the current ones."""
    current = scores.logprobs.detach()

    def where_live(values: Tensor | None) -> Tensor:
        return current if values is None else torch.where(batch.mask, values, current)

    makers: dict[str, Callable[[], Tensor | None]] = {
        "old_logprobs": lambda: where_live(batch.old_logprobs),
        "ref_logprobs": lambda: where_live(batch.ref_logprobs),
        "teacher_logprobs": lambda: where_live(batch.teacher_logprobs),
        "entropy": lambda: scores.entropy,
        "old_entropy": lambda: batch.old_entropy,
        "router_shift": lambda: router_shift,
        "rewards": lambda: batch.rewards,
        "group_ids": lambda: batch.group_ids,
        "topk_logprobs": lambda: _joined(batch, scores.top_logprobs, current),
        "rollout_topk": lambda: _joined(batch, batch.rollout_top_logprobs, where_live(batch.rollout_logprobs)),
    }
    for name, values in (("ref_logprobs", batch.ref_logprobs), ("teacher_logprobs", batch.teacher_logprobs)):
        if name in needs and values is None:
            raise ConfigError(f"the objective reads {name}, but the batch was not scored for them; call score first")
    optional = {name: maker() for name, maker in makers.items() if name in needs}
    return LossInputs(
        logprobs=scores.logprobs,
        rollout_logprobs=where_live(batch.rollout_logprobs),
        advantages=batch.advantages,
        mask=batch.mask,
        weights=batch.weights,
        seq_ids=batch.seq_ids,
        num_seqs=batch.num_seqs,
        constants=batch.constants,
        optional={name: value for name, value in optional.items() if value is not None},
    )


def _joined(batch: MicroBatch, top_logprobs: Tensor | None, logprobs: Tensor) -> Tensor:
    if top_logprobs is None:
        raise ConfigError(
            "the objective compares the engine's likeliest tokens, but the samples carry none; use a rollout.engine "
            "that returns them, and rollout.top_logprobs above 0"
        )
    return join_sampled(batch, top_logprobs, logprobs)


def fill_step(batch: StepBatch, scored: Sequence[MicroBatch], filled: Sequence[dict[str, Tensor]]) -> StepBatch:
    """Put the fields of the scored micro-batches into every epoch, sample by sample where packs differ."""
    if not any(filled):
        return batch
    by_pack = {micro.sample_ids: fields for micro, fields in zip(scored, filled, strict=True)}
    by_sample: dict[int, dict[str, Tensor]] = {}
    for micro, fields in zip(scored, filled, strict=True):
        bounds = micro.cu_seqlens.tolist()
        for i, sample in enumerate(micro.sample_ids):
            by_sample[sample] = {name: value[bounds[i] : bounds[i + 1]] for name, value in fields.items()}

    def fill(micro: MicroBatch) -> MicroBatch:
        if micro.is_filler:
            return replace(micro, **{name: value[:0] for name, value in filled[0].items()})  # pyright: ignore[reportArgumentType] names of tensor fields only
        fields = by_pack.get(micro.sample_ids)
        if fields is None:
            parts = [by_sample[sample] for sample in micro.sample_ids]
            fields = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return replace(micro, **fields)  # pyright: ignore[reportArgumentType] names of tensor fields only

    return replace(batch, minibatches=tuple(tuple(fill(micro) for micro in mini) for mini in batch.minibatches))
