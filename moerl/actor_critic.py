"""Policy and critic as one learner: to the loop it is a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.metrics import Last, Max, Metrics, Min, masked_mean, merge_into
from moerl.protocols import Critic, Policy
from moerl.types import StepBatch


class ActorCritic:
    """Scores with both, trains both on the same minibatches, keeps both in one checkpoint."""

    def __init__(
        self,
        policy: Policy,
        critic: Critic,
        *,
        pretrain_steps: int,
        merge: Callable[[Metrics], Metrics] = lambda metrics: metrics,
    ) -> None:
        """During the critic's first `pretrain_steps` updates the policy holds (VAPO, arXiv 2504.05118).

        `merge` makes one of the metrics of all data-parallel ranks.
        """
        self._policy = policy
        self._critic = critic
        self._pretrain_steps = pretrain_steps
        self._merge = merge

    @property
    def version(self) -> int:
        """The policy's: its completed updates."""
        return self._policy.version

    def score(self, batch: StepBatch, needs: frozenset[str]) -> tuple[StepBatch, Metrics]:
        """As the policy's, and `old_values`."""
        batch, metrics = self._policy.score(batch, needs)
        return self._critic.score(batch), metrics

    def update(self, batch: StepBatch, objective: Any) -> Metrics:
        """One optimizer step per minibatch of the critic, then of the policy.

        Raises:
            NumericsError: a loss or gradient of either is not finite; where it is the policy's, the critic has moved.
        """
        metrics = self._merge(_advantage_metrics(batch))
        merge_into(metrics, self._critic.update(batch))
        is_pretraining = self._critic.version <= self._pretrain_steps
        metrics["critic/is_pretraining"] = Last(float(is_pretraining))
        return metrics if is_pretraining else merge_into(metrics, self._policy.update(batch, objective))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights: engines know no critic."""
        return self._policy.export()

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Both; the critic's files are in a folder of their own inside."""
        works = [self._policy.begin_save(folder), self._critic.begin_save(folder)]

        def write() -> None:
            for work in works:
                work()

        return write

    def save(self, folder: Path) -> None:
        """Both at once."""
        self.begin_save(folder)()

    def load(self, folder: Path) -> None:
        """Restore both, bit for bit.

        Raises:
            CheckpointError: a part is missing, damaged or of another model.
        """
        self._policy.load(folder)
        self._critic.load(folder)


def _advantage_metrics(batch: StepBatch) -> Metrics:
    """Over the live tokens of the first epoch."""
    metrics: Metrics = {}
    for micro in (micro for mini in batch.minibatches[: batch.num_score_minibatches] for micro in mini):
        if micro.is_filler:
            continue
        values = micro.advantages.double()
        new: Metrics = {
            "advantage/mean": masked_mean(values, micro.mask),
            "advantage/abs_mean": masked_mean(values.abs(), micro.mask),
            "advantage/max": Max(values.masked_fill(~micro.mask, -torch.inf).max()),
            "advantage/min": Min(values.masked_fill(~micro.mask, torch.inf).min()),
        }
        merge_into(metrics, new)
    return metrics
