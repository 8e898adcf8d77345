"""Log-probabilities, masks and rewards of some sequences, without a model: what an objective is evaluated on.

Tensors come packed (flat [t], whole sequences one after another) or padded ([b, s] with a mask) and are kept packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict, cast

import torch
from torch import Tensor

from moerl.errors import DataError
from moerl.types import MicroBatch, join_sampled

COLUMNS = (
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "entropy",
    "router_shift",
    "values",
    "old_values",
    "returns",
    "old_entropy",
    "teacher_logprobs",
    "topk_logprobs",
    "rollout_topk",
    "token_ids",
)
"""What may be known of every token beside its log-probability."""


class TensorFields(TypedDict, total=False):
    """Keyword arguments of `TokenBatch.from_tensors`; per token means [t] packed or [b, s] padded."""

    logprobs: Tensor
    """Per token, float: log p(token | before) of the policy that is trained, in nats, at the sampling temperature."""
    mask: Tensor
    """Per token, bool or 0 / 1: tokens to train. Needed where padded; packed, everything where absent."""
    seq_ids: Tensor
    """[t] int, packed only: 0, 0, 0, 1, 1, ...; does not decrease."""
    cu_seqlens: Tensor
    """[n + 1] int, packed only, in place of `seq_ids`: where each sequence starts, and the end."""
    old_logprobs: Tensor
    """Per token: the policy at the start of the step. Absent: the current one, as at the first update."""
    rollout_logprobs: Tensor
    """Per token: as the engine reported."""
    ref_logprobs: Tensor
    """Per token: the frozen reference."""
    entropy: Tensor
    """Per token, nats: of the whole next-token distribution; may carry gradient."""
    router_shift: Tensor
    """Per token in (0, 1]: RSPO's factor."""
    values: Tensor
    """Per token: the critic's value; may carry gradient."""
    old_values: Tensor
    """Per token: the critic at the start of the step."""
    returns: Tensor
    """Per token: what the values are fitted to."""
    old_entropy: Tensor
    """Per token, nats: at the start of the step. Absent: `entropy`."""
    teacher_logprobs: Tensor
    """Per token: a teacher (distillation)."""
    topk_logprobs: Tensor
    """Per token, [..., k + 1]: the current policy on the rollout's k likeliest tokens and the sampled one."""
    rollout_topk: Tensor
    """Per token, [..., k + 1]: the rollout policy on the same; -inf in both where the sampled one is among the k."""
    token_ids: Tensor
    """Per token, int: only shown."""
    advantages: Tensor
    """Per token, or one for each sequence ([n] or [b])."""
    rewards: Tensor
    """[n] or, one column a reward, [n, c]; NaN where unscored."""
    group_ids: Tensor
    """[n] int: which sequences answer the same prompt; any labels."""


@dataclass(frozen=True)
class TokenBatch:
    """Sequences packed flat: `logprobs` [t] with gradient, columns [t], rewards [n, c]."""

    logprobs: Tensor
    mask: Tensor
    """[t] bool."""
    seq_ids: Tensor
    """[t] int64 in 0..num_seqs-1, not decreasing."""
    num_seqs: int
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Those of `COLUMNS` that are known, [t] each."""
    advantages: Tensor | None = None
    """[t], given rather than made from the rewards."""
    rewards: Tensor | None = None
    """[n, c]."""
    group_ids: Tensor | None = None
    """[n] int64."""
    source: Tensor | None = None
    """The log-probabilities as they were handed in; the gradient is with respect to these."""
    slots: Tensor | None = None
    """[b, s] bool: where the packed tokens sit in the padded layout."""

    @classmethod
    def from_tensors(cls, fields: TensorFields) -> TokenBatch:
        """Check shapes and pack.

        Raises:
            DataError: a field that is missing or of the wrong shape; says which and what it must be.
        """
        unknown = set(fields) - set(TensorFields.__annotations__)
        if unknown:
            known = ", ".join(TensorFields.__annotations__)
            raise DataError(f"no such field: {', '.join(sorted(unknown))}; known: {known}")
        given = cast("Mapping[str, Tensor]", fields)
        if "logprobs" not in given:
            raise DataError("logprobs is missing: [t] packed or [b, s] padded log-probabilities")
        source = given["logprobs"]
        if not source.is_floating_point():
            raise DataError(f"logprobs are {source.dtype}, but must be floating-point log-probabilities")
        source = source if source.requires_grad else source.detach().requires_grad_()
        if source.dim() == 2:
            return _pack(source, given)
        if source.dim() != 1:
            raise DataError(f"logprobs have shape {list(source.shape)}, but must be [t] packed or [b, s] padded")
        return _packed(source, given)

    @property
    def lengths(self) -> Tensor:
        """[n] int64: tokens with mask True."""
        return torch.bincount(self.seq_ids[self.mask], minlength=self.num_seqs)

    @property
    def groups(self) -> Tensor:
        """[n] int64: the labels given, or each sequence for itself."""
        return torch.arange(self.num_seqs) if self.group_ids is None else self.group_ids

    def as_given(self, values: Tensor) -> Tensor:
        """[t] values in the layout of the input: themselves, or [b, s] with 0 outside the mask."""
        if self.slots is None:
            return values
        return values.new_zeros(self.slots.shape).masked_scatter(self.slots, values)

    def sequences(self, rows: Tensor) -> TokenBatch:
        """The sequences `rows` [m] int64 (increasing), packed anew; the gradient goes to the picked tokens only."""
        chosen = torch.isin(self.seq_ids, rows)
        fresh = torch.full((self.num_seqs,), -1, dtype=torch.int64)
        fresh[rows] = torch.arange(len(rows))
        logprobs = self.logprobs.detach()[chosen].requires_grad_()
        return TokenBatch(
            logprobs=logprobs,
            mask=self.mask[chosen],
            seq_ids=fresh[self.seq_ids[chosen]],
            num_seqs=len(rows),
            columns={name: values[chosen] for name, values in self.columns.items()},
            advantages=None if self.advantages is None else self.advantages[chosen],
            rewards=None if self.rewards is None else self.rewards[rows],
            group_ids=None if self.group_ids is None else self.group_ids[rows],
            source=logprobs,
        )

    def without_advantages(self) -> TokenBatch:
        """So that they are made anew from the rewards."""
        return dataclasses.replace(self, advantages=None)

    def moved(self, scale: float, seed: int = 0) -> TokenBatch:
        """As if the policy had moved since: normal noise of standard deviation `scale` (nats) on the log-probabilities.

        The old log-probabilities are then those of before.
        """
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.logprobs.shape, generator=generator, dtype=torch.float64)
        now = (self.logprobs.detach() + scale * noise).clamp(max=0).to(self.logprobs.dtype).requires_grad_()
        columns = {"old_logprobs": self.logprobs.detach(), **self.columns}
        return dataclasses.replace(self, logprobs=now, source=now, slots=None, columns=columns)


def from_micro_batches(micro_batches: tuple[MicroBatch, ...]) -> TokenBatch:
    """Micro-batches of a dump, in order, as one batch. The policy is the one at the start of the step.

    Its log-probabilities are `old_logprobs`, or the engine's where no score pass ran; they are the current ones too.
    """
    micro_batches = tuple(micro for micro in micro_batches if not micro.is_filler)
    if not micro_batches:
        raise DataError("the dump holds no micro-batches; dump a step that trained")
    old = [micro.rollout_logprobs if micro.old_logprobs is None else micro.old_logprobs for micro in micro_batches]
    starts = torch.tensor([0, *(micro.num_seqs for micro in micro_batches)]).cumsum(0)
    reference = [micro.ref_logprobs for micro in micro_batches if micro.ref_logprobs is not None]
    fields = TensorFields(
        logprobs=torch.cat(old).detach().clone(),
        mask=torch.cat([micro.mask for micro in micro_batches]),
        seq_ids=torch.cat([micro.seq_ids + start for micro, start in zip(micro_batches, starts, strict=False)]),
        old_logprobs=torch.cat(old),
        rollout_logprobs=torch.cat([micro.rollout_logprobs for micro in micro_batches]),
        token_ids=torch.cat([micro.token_ids for micro in micro_batches]),
        advantages=torch.cat([micro.advantages for micro in micro_batches]),
        rewards=torch.cat([micro.rewards for micro in micro_batches]),
        group_ids=torch.cat([micro.group_ids for micro in micro_batches]),
    )
    if len(reference) == len(micro_batches):
        fields["ref_logprobs"] = torch.cat(reference)
    if all(micro.rollout_top_logprobs is not None for micro in micro_batches):
        pairs = [_top_pair(micro, current) for micro, current in zip(micro_batches, old, strict=True)]
        fields["rollout_topk"], fields["topk_logprobs"] = (torch.cat(part) for part in zip(*pairs, strict=True))
    return TokenBatch.from_tensors(fields)


def _top_pair(micro: MicroBatch, current: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs [t, k + 1] of the rollout policy and of the policy, on the engine's likeliest tokens and the sampled."""
    rollout = micro.rollout_top_logprobs
    assert rollout is not None
    policy = rollout if micro.old_top_logprobs is None else micro.old_top_logprobs
    return join_sampled(micro, rollout, micro.rollout_logprobs), join_sampled(micro, policy, current)


def _packed(source: Tensor, fields: Mapping[str, Tensor]) -> TokenBatch:
    (size,) = source.shape
    seq_ids, num_seqs = _sequences(fields, size)
    mask = _bool_mask(fields["mask"], source.shape) if "mask" in fields else torch.ones(size, dtype=torch.bool)
    columns = {name: _column(name, fields[name], source) for name in COLUMNS if name in fields}
    advantages = None
    if "advantages" in fields:
        given = fields["advantages"]
        is_token = given.shape == source.shape and (size != num_seqs or given.dim() == 1)
        advantages = given if is_token else _per_sequence("advantages", given, num_seqs)[seq_ids]
    return TokenBatch(
        logprobs=source,
        mask=mask,
        seq_ids=seq_ids,
        num_seqs=num_seqs,
        columns=columns,
        advantages=advantages,
        rewards=_rewards(fields, num_seqs),
        group_ids=_groups(fields, num_seqs),
        source=source,
    )


def _pack(source: Tensor, fields: Mapping[str, Tensor]) -> TokenBatch:
    """Padded to packed: only the tokens under the mask are kept."""
    for name in ("seq_ids", "cu_seqlens"):
        if name in fields:
            raise DataError(f"logprobs are [b, s], so {name} must be left out: the rows are the sequences")
    if "mask" not in fields:
        raise DataError(f"logprobs are [b, s] = {list(source.shape)}, so mask [b, s] is needed: which tokens are real")
    num_seqs = source.shape[0]
    slots = _bool_mask(fields["mask"], source.shape)
    seq_ids = slots.nonzero()[:, 0]
    columns = {name: _column(name, fields[name], source)[slots] for name in COLUMNS if name in fields}
    advantages = None
    if "advantages" in fields:
        given = fields["advantages"]
        is_token = given.shape == source.shape
        advantages = given[slots] if is_token else _per_sequence("advantages", given, num_seqs)[seq_ids]
    return TokenBatch(
        logprobs=source[slots],
        mask=torch.ones(len(seq_ids), dtype=torch.bool),
        seq_ids=seq_ids,
        num_seqs=num_seqs,
        columns=columns,
        advantages=advantages,
        rewards=_rewards(fields, num_seqs),
        group_ids=_groups(fields, num_seqs),
        source=source,
        slots=slots,
    )


def _sequences(fields: Mapping[str, Tensor], size: int) -> tuple[Tensor, int]:
    if ("seq_ids" in fields) == ("cu_seqlens" in fields):
        raise DataError("packed logprobs need either seq_ids [t] or cu_seqlens [n + 1], one of the two")
    if "cu_seqlens" in fields:
        bounds = fields["cu_seqlens"].to(torch.int64)
        lengths = bounds.diff()
        if bounds.dim() != 1 or not len(bounds) or bounds[0] != 0 or bounds[-1] != size or (lengths < 0).any():
            raise DataError(f"cu_seqlens is {bounds.tolist()}, but must rise from 0 to the number of tokens, {size}")
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths), len(lengths)
    seq_ids = fields["seq_ids"].to(torch.int64)
    if seq_ids.shape != (size,) or (size and (seq_ids[0] < 0 or (seq_ids.diff() < 0).any())):
        raise DataError(f"seq_ids has shape {list(seq_ids.shape)}, but must be [{size}], start at 0 and not decrease")
    named = [len(fields[name]) for name in ("rewards", "group_ids") if name in fields]
    return seq_ids, max([int(seq_ids[-1]) + 1 if size else 0, *named])


def _bool_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    if mask.shape != shape:
        raise DataError(f"mask has shape {list(mask.shape)}, but logprobs have {list(shape)}; they must agree")
    if mask.dtype != torch.bool and ((mask != 0) & (mask != 1)).any():
        raise DataError("mask holds values other than 0 and 1; give a bool tensor, True on tokens to train")
    return mask.bool()


def _column(name: str, values: Tensor, source: Tensor) -> Tensor:
    wanted = source.dim() + (name in ("topk_logprobs", "rollout_topk"))
    if values.dim() != wanted or values.shape[: source.dim()] != source.shape:
        raise DataError(f"{name} has shape {list(values.shape)}, but must be {list(source.shape)} like logprobs")
    return values


def _per_sequence(name: str, values: Tensor, num_seqs: int) -> Tensor:
    if values.shape != (num_seqs,):
        raise DataError(f"{name} has shape {list(values.shape)}, but must be [{num_seqs}], or per token like logprobs")
    return values


def _rewards(fields: Mapping[str, Tensor], num_seqs: int) -> Tensor | None:
    if "rewards" not in fields:
        return None
    rewards = fields["rewards"].double()
    if rewards.dim() not in (1, 2) or len(rewards) != num_seqs:
        raise DataError(f"rewards have shape {list(rewards.shape)}, but must be [{num_seqs}] or [{num_seqs}, rewards]")
    return rewards.unsqueeze(1) if rewards.dim() == 1 else rewards


def _groups(fields: Mapping[str, Tensor], num_seqs: int) -> Tensor | None:
    if "group_ids" not in fields:
        return None
    return _per_sequence("group_ids", fields["group_ids"], num_seqs).to(torch.int64)
