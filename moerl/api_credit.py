"""Credit of a batch of tensors by the rules of a training step: `moerl/api.py` as one step without a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.objective import Objective
from moerl.algorithms.registries import objectives
from moerl.algorithms.types import OLD_PASS
from moerl.build_credit import MinibatchWeights, build_token_rules, credit_state
from moerl.config.schema import AlgorithmSection
from moerl.credit import CreditRules, credit_inputs, in_whole_pairs
from moerl.data.batch import as_token_weights, token_weights
from moerl.data.token_batch import TokenBatch
from moerl.errors import DataError
from moerl.metrics import Metrics, merge_into
from moerl.token_credit import TokenCredit
from moerl.types import MicroBatch, Sample, StepBatch, TokenWeights

COLUMN_NEEDS = frozenset({"old_logprobs", "ref_logprobs", "teacher_logprobs", "old_entropy", "old_values"})
"""Columns that credit may read; the others are the objective's."""


@dataclass(frozen=True)
class BatchCredit:
    """The credit rules of a section, applied to whole batches."""

    section: AlgorithmSection
    objective: Objective

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        needs = self._token_credit(1).needs - {OLD_PASS}
        return needs | ({"old_values"} if self.section.advantage.center == "value" else frozenset())

    def __call__(self, batch: TokenBatch) -> tuple[MicroBatch, Metrics]:
        """The batch as one scored minibatch: mask, advantages, weights and constants final.

        A schedule of several updates is taken as one. Advantages that the batch brings stay as they are.

        Raises:
            DataError: a column that a rule reads is missing, or neither advantages nor rewards are there.
        """
        samples = _samples(batch)
        metrics: Metrics = {}
        micro = self._micro_batch(batch, samples)
        given = batch.advantages
        step = StepBatch(((micro,),), 1, 0, len(samples), micro.num_tokens, int(micro.mask.sum()))
        done, more = self._token_credit(_width(batch))(step, samples, samples)
        merge_into(metrics, more)
        parts = [mini[0] for mini in done.minibatches]
        mask = torch.stack([part.mask for part in parts]).any(0)
        advantages = parts[0].advantages if given is None else given.to(micro.advantages.dtype)
        return replace(parts[0], mask=mask, advantages=advantages), metrics

    def _token_credit(self, num_rewards: int) -> TokenCredit:
        rules = CreditRules(
            advantages=partial(group_advantages, self.section.advantage),
            shaping=_unused,
            keeps=_unused,
            counts=_unused,
            reward_weights={f"reward_{i}": 1.0 for i in range(num_rewards)},
            state=credit_state(self.section),
        )
        return TokenCredit(build_token_rules(self.section, self.objective, rules), lambda values: [values])

    def _micro_batch(self, batch: TokenBatch, samples: list[Sample]) -> MicroBatch:
        dtype = torch.promote_types(batch.logprobs.dtype, torch.float32)
        advantages, mask = self._advantages(batch, samples, dtype)
        lengths = torch.bincount(batch.seq_ids[mask], minlength=batch.num_seqs).numpy()
        groups = batch.groups.numpy()
        weights = MinibatchWeights(self.section)
        tasks = np.array([sample.reward for sample in samples])
        shares = {"policy": weights.policy(lengths, groups), **weights.terms(lengths, groups, tasks)}
        whole = torch.bincount(batch.seq_ids, minlength=batch.num_seqs)
        spread = token_weights(shares, range(batch.num_seqs), whole.numpy(), mask.numpy())
        columns = {name: self._column(batch, name) for name in self.needs & COLUMN_NEEDS}
        current = batch.logprobs.detach()
        return MicroBatch(
            sample_ids=tuple(range(batch.num_seqs)),
            token_ids=torch.zeros_like(batch.seq_ids),
            position_ids=torch.zeros_like(batch.seq_ids),
            cu_seqlens=torch.cat([whole.new_zeros(1), whole.cumsum(0)]).int(),
            seq_ids=batch.seq_ids,
            group_ids=batch.groups,
            rewards=torch.tensor(tasks).to(dtype),
            mask=mask,
            rollout_logprobs=batch.columns.get("rollout_logprobs", current),
            advantages=advantages,
            temperature=torch.ones_like(current),
            weights=_weights(spread, dtype),
            **columns,  # pyright: ignore[reportArgumentType]  names of tensor fields only
        )

    def _advantages(self, batch: TokenBatch, samples: list[Sample], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """([t] advantages, [t] mask) of group credit."""
        if batch.advantages is not None:
            return batch.advantages.to(dtype), batch.mask
        if batch.rewards is None:
            raise DataError("neither advantages nor rewards were given; give one of them")
        rule = self.section.advantage
        if batch.group_ids is None and (rule.center.startswith("group") or rule.scale.startswith("group")):
            raise DataError(
                f"the advantage ({rule.center}, {rule.scale}) is made within groups; give group_ids [n], or advantages"
            )
        names = {f"reward_{i}": 1.0 for i in range(batch.rewards.shape[1])}
        values, _ = group_advantages(rule, credit_inputs(samples, names, credit_state(self.section)))
        replacing, _ = objectives.resolve(self.section.objective, where="algorithm.objective")
        pairs = bool(replacing.traits.get("pairs", False))
        mask = batch.mask
        if pairs:
            kept = in_whole_pairs(values.numpy(), batch.groups.numpy(), (batch.lengths > 0).numpy())
            mask = mask & torch.from_numpy(kept)[batch.seq_ids]
        return values[batch.seq_ids].to(dtype), mask

    def _column(self, batch: TokenBatch, name: str) -> Tensor:
        stand_ins = {"old_entropy": "entropy", "old_values": "values"}
        if name == "old_logprobs" and name not in batch.columns:
            return batch.logprobs.detach()
        for candidate in (name, stand_ins.get(name, name)):
            if candidate in batch.columns:
                return batch.columns[candidate].detach()
        raise DataError(f"the method reads {name}, which was not given; give it per token, like logprobs")


def _samples(batch: TokenBatch) -> list[Sample]:
    """One row for each sequence."""
    lengths = batch.lengths
    groups = batch.groups
    rewards = np.zeros((batch.num_seqs, 1)) if batch.rewards is None else batch.rewards.numpy()
    bounds = torch.bincount(batch.seq_ids, minlength=batch.num_seqs).cumsum(0).tolist()
    nothing = np.zeros(0, dtype=np.float32)
    mask = batch.mask.numpy()
    return [
        Sample(
            sample_id=i,
            group_id=int(groups[i]),
            prompt_id=str(int(groups[i])),
            token_ids=nothing,
            loss_mask=mask[start:end],
            rollout_logprobs=nothing,
            advantages=nothing,
            reward=float(rewards[i].sum()),
            temperature=1.0,
            components=rewards[i],
            response_length=int(lengths[i]),
        )
        for i, (start, end) in enumerate(zip([0, *bounds[:-1]], bounds, strict=True))
    ]


def _weights(spread: dict[str, np.ndarray], dtype: torch.dtype) -> TokenWeights:
    return as_token_weights({term: torch.from_numpy(values).to(dtype) for term, values in spread.items()})


def _width(batch: TokenBatch) -> int:
    return 1 if batch.rewards is None else batch.rewards.shape[1]


def _unused(*_: Any) -> Any:
    raise AssertionError("shaping and filters act where answers are sampled")
