"""What the score pass saw of the routers, sample by sample, until the last minibatch is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.mcore.router_replay import Observation
from moerl.mcore.step import MicroResult
from moerl.types import MicroBatch, StepBatch


@dataclass(frozen=True)
class _Seen:
    """Of one sample, kept for the pair (old, current)."""

    own_routes: Tensor
    log_probs: Tensor


class OldRouting:
    """Log q over all experts is large: it is kept for the samples of the last minibatch alone."""

    def __init__(self) -> None:
        """Empty, as after `clear`."""
        self._samples: dict[int, _Seen] = {}

    def clear(self) -> None:
        """Forget the step before."""
        self._samples.clear()

    def keep(self, batch: StepBatch, scored: Sequence[MicroBatch], results: Sequence[MicroResult]) -> None:
        """Of `scored`, what the last minibatch of `batch` will need."""
        wanted = {sample for micro in batch.minibatches[-1] for sample in micro.sample_ids}
        for micro, result in zip(scored, results, strict=True):
            if result.observed is None:
                continue
            bounds = micro.cu_seqlens.tolist()
            for i, sample in enumerate(micro.sample_ids):
                if sample in wanted:
                    rows = slice(bounds[i], bounds[i + 1])
                    seen = result.observed
                    self._samples[sample] = _Seen(seen.own_routes[rows], seen.log_probs[rows])

    def covers(self, minibatch: Sequence[MicroBatch]) -> bool:
        """Whether every sample was kept; the same on every rank, as fillers go by what the score pass filled."""
        if all(batch.is_filler for batch in minibatch):
            return all(batch.old_routes is not None for batch in minibatch)
        return all(sample in self._samples for batch in minibatch for sample in batch.sample_ids)

    def of(self, batch: MicroBatch, now: Observation) -> Observation:
        """Of the samples of one micro-batch; `now` of the same tokens, which is as good where there are none."""
        if batch.is_filler:
            return now
        kept = [self._samples[sample] for sample in batch.sample_ids]
        log_probs = torch.cat([old.log_probs for old in kept])
        return Observation(torch.cat([old.own_routes for old in kept]), log_probs, log_probs)
