"""Log-probability and entropy of given tokens from hidden states, on a vocabulary that may be sharded over a group.

linear -> / temperature -> log-softmax -> gather, in chunks of rows, so that [t, v] never exists whole; the backward
pass computes each chunk's logits again. Reductions over the vocabulary are float32 whatever the dtype of the model.

Gradients with respect to the hidden states are this shard's part of a sum over the group: the caller enters through
megatron's `copy_to_tensor_model_parallel_region` or its sequence-parallel gather, whose backward adds the parts up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.types import PackedSupport

CHUNK_ELEMENTS = 1 << 24
"""Logits in flight at once: 64 MiB of float32."""

_OUT = -1e30
"""Logit of a token outside the support: finite, so that 0 * logit is 0, and far below every real one."""


@dataclass(frozen=True)
class VocabShard:
    """Which part of the vocabulary this rank holds."""

    start: int = 0
    """First token id of the local rows of the output weight."""
    size: int | None = None
    """Rows that are real tokens, this rank's share; None: all of them (the rest is padding of the vocabulary)."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other parts; None when there are none."""

    def sum_(self, value: Tensor) -> Tensor:
        """Sum over the shards, in place."""
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def max_(self, value: Tensor) -> Tensor:
        """Maximum over the shards, in place."""
        if self.group is not None:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value


@dataclass(frozen=True)
class _Job:
    """Everything of one call that carries no gradient."""

    targets: Tensor
    inverse_temperature: Tensor
    support: PackedSupport | None
    shard: VocabShard
    chunk: int
    ids: Tensor | None = None
    """[r, k] int64: further tokens to give the log-probability of."""

    def logits(self, hidden: Tensor, weight: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """[c, v] float32 logits at temperature, and [c, v] bool: not in the running (None: all are)."""
        logits = (hidden[rows] @ weight.t()).float().mul_(self.inverse_temperature[rows, None])
        size = self.shard.size
        if size is not None and size < logits.shape[1]:
            logits[:, size:] = _OUT
        outside = self._outside(rows, logits) if self.support is not None else None
        if outside is not None:
            logits.masked_fill_(outside, _OUT)
        return logits, outside

    def _outside(self, rows: slice, logits: Tensor) -> Tensor:
        assert self.support is not None
        offsets = self.support.offsets[rows.start : rows.stop + 1]
        counts = offsets.diff()
        ids = self.support.ids[int(offsets[0]) : int(offsets[-1])] - self.shard.start
        row_of_id = torch.repeat_interleave(torch.arange(counts.shape[0], device=ids.device), counts)
        local = (ids >= 0) & (ids < logits.shape[1])
        outside = (counts > 0)[:, None].expand_as(logits).clone()
        outside[row_of_id[local], ids[local]] = False
        return outside

    def own(self, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """Where this shard holds the target [c] bool, and the target's local column [c], clamped into range."""
        return self._here(self.targets[rows], width)

    def further(self, shifted: Tensor, rows: slice) -> Tensor:
        """[c, k]: entries of `shifted` [c, v] at the further tokens, over all shards."""
        assert self.ids is not None
        owned, column = self._here(self.ids[rows], shifted.shape[1])
        return self.shard.sum_(shifted.gather(-1, column).masked_fill_(~owned, 0.0))

    def _here(self, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
        local = ids - self.shard.start
        return (local >= 0) & (local < width), local.clamp(0, width - 1)


def _row_slices(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: _Job) -> tuple[Tensor, Tensor, Tensor]:
        count = hidden.shape[0]
        further = hidden.new_empty((count, 0 if job.ids is None else job.ids.shape[1]), dtype=torch.float32)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy, log_norm = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _row_slices(count, job.chunk):
            logits, _ = job.logits(hidden, weight, rows)
            largest = job.shard.max_(logits.amax(-1))
            # Relative to the largest logit: small entropies would drown in the rounding of a large normaliser.
            shifted = logits.sub_(largest[:, None])
            owned, column = job.own(rows, shifted.shape[1])
            target = shifted.gather(-1, column[:, None])[:, 0].masked_fill_(~owned, 0.0)
            if job.ids is not None:
                further[rows] = job.further(shifted, rows)
            weights = shifted.exp()
            sums = job.shard.sum_(torch.stack([weights.sum(-1), (weights * shifted).sum(-1), target]))
            log_sum = sums[0].log()
            log_norm[rows] = largest + log_sum
            logprobs[rows] = sums[2] - log_sum
            entropy[rows] = log_sum - sums[1] / sums[0]
            further[rows] -= log_sum[:, None]
        ctx.save_for_backward(hidden, weight, log_norm, entropy)
        ctx.job = job
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(further)
        return logprobs, entropy, further

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None]:
        hidden, weight, log_norm, entropy = ctx.saved_tensors
        job: _Job = ctx.job
        logprob_grad, entropy_grad, _ = grads
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _row_slices(hidden.shape[0], job.chunk):
            logits, outside = job.logits(hidden, weight, rows)
            log_p = logits.sub_(log_norm[rows, None])
            p = log_p.exp()
            logit_grad = torch.zeros_like(p)
            if logprob_grad is not None:
                g = logprob_grad[rows].float()
                owned, column = job.own(rows, p.shape[1])
                logit_grad.addcmul_(p, g[:, None], value=-1.0)
                logit_grad.scatter_add_(1, column[:, None], g.masked_fill(~owned, 0.0)[:, None])
            if entropy_grad is not None:
                # dH/dz = -p (log p + H)
                logit_grad.addcmul_(p * (log_p + entropy[rows, None]), entropy_grad[rows, None].float(), value=-1.0)
            if outside is not None:
                logit_grad.masked_fill_(outside, 0.0)
            logit_grad = logit_grad.mul_(job.inverse_temperature[rows, None]).to(hidden.dtype)
            hidden_grad[rows] = logit_grad @ weight
            weight_grad += (logit_grad.t() @ hidden[rows]).float()
        return hidden_grad, weight_grad.to(weight.dtype), None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    support: PackedSupport | None = None,
    shard: VocabShard | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[targets] and the entropy of that distribution, both [r] float32 with
    gradient.

    Args:
        hidden: [r, h], one row per prediction.
        weight: [v, h], this rank's rows of the output matrix.
        targets: [r] int64, global token ids.
        temperature: [r] float, above 0.
        support: Token ids in the running, by row (`offsets` [r + 1]); a row without any is normalised over the
            vocabulary. A target outside its own support gets a log-probability near -1e30.
        shard: Which rows of the vocabulary `weight` is; the whole one by default.
        chunk_elements: Bound on logits that exist at a time.
    """
    settings = _Settings(support, shard, chunk_elements)
    logprobs, entropy, _ = _apply(hidden, weight, (targets, None), temperature, settings)
    return logprobs, entropy


def linear_top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: tuple[Tensor, Tensor],
    temperature: Tensor,
    *,
    support: PackedSupport | None = None,
    shard: VocabShard | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `linear_logprobs`, and from the same logits the log-probabilities of further tokens, without gradient.

    Args:
        hidden: [r, h].
        weight: [v, h].
        targets: [r] int64, and the further tokens [r, k] int64; what is no token id gets a value without meaning.
        temperature: [r].
        support: as there.
        shard: as there.
        chunk_elements: as there.

    Returns:
        Log-probabilities [r] and entropies [r] with gradient, log-probabilities of the further tokens [r, k].
    """
    return _apply(hidden, weight, targets, temperature, _Settings(support, shard, chunk_elements))


@dataclass(frozen=True)
class _Settings:
    support: PackedSupport | None
    shard: VocabShard | None
    chunk_elements: int


def _apply(
    hidden: Tensor, weight: Tensor, targets: tuple[Tensor, Tensor | None], temperature: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor]:
    chunk = max(1, settings.chunk_elements // weight.shape[0])
    shard = settings.shard or VocabShard()
    job = _Job(targets[0], temperature.float().reciprocal(), settings.support, shard, chunk, targets[1])
    return _LinearLogprob.apply(hidden, weight, job)  # pyright: ignore[reportReturnType] apply is untyped


def shift_support(support: PackedSupport) -> PackedSupport:
    """The support of tokens 1..t-1, i.e. by the row that predicts them: row j of hidden states predicts token j + 1."""
    return PackedSupport(support.ids, support.offsets[1:])
