"""Log-probability and entropy of given tokens from hidden states, on a vocabulary that may be sharded over a group.

linear -> / temperature -> log-softmax -> gather, tile by tile of rows and vocabulary with a running normaliser, so that
[t, v] never exists whole; the backward pass computes each tile's logits again. What is summed over the vocabulary, over
the hidden width (of gradients) and over rows is summed in float32 whatever the dtype of the model, in float64 for
float64 inputs.

Gradients with respect to the hidden states are this shard's part of a sum over the group: the caller enters through
megatron's `copy_to_tensor_model_parallel_region` or its sequence-parallel gather, whose backward adds the parts up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.types import PackedSupport

TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits in flight at once, by device: on a CPU what its caches hold (4 MiB of float32), on a GPU what fills it."""
TILE_ROWS = {"cpu": 1024, "cuda": 4096}
"""Rows of a tile whose vocabulary is cut: enough that reading the weights costs little beside multiplying them."""

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
    inverse_temperature: Tensor | None
    """[r]; None: 1 everywhere, and a pass over every tile is saved."""
    support: PackedSupport | None
    shard: VocabShard
    tile: tuple[int, int]
    """Rows and columns."""
    in_float32: bool
    """The product itself, not only the sums, is of float32 factors."""
    ids: Tensor | None = None
    """[r, k] int64: further tokens to give the log-probability of."""

    def row_blocks(self) -> Iterator[slice]:
        return _slices(self.targets.shape[0], self.tile[0])

    def column_blocks(self, weight: Tensor) -> Iterator[slice]:
        return _slices(weight.shape[0], self.tile[1])

    def wide(self, factor: Tensor) -> Tensor:
        """A factor of a product as it is multiplied: float32 where asked for, else the model's dtype."""
        return factor.float() if self.in_float32 and factor.dtype.itemsize < 4 else factor

    def logits(self, hidden: Tensor, weight: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """[r, c] logits of a tile at temperature, and [r, c] bool: not in the running (None: all are)."""
        product = self.wide(hidden[rows]) @ self.wide(weight[columns]).t()
        logits = self.tempered(product.to(_sum_dtype(product)), rows)
        size = self.shard.size
        if size is not None and size < columns.stop:
            logits[:, max(0, size - columns.start) :] = _OUT
        outside = self._outside(rows, columns) if self.support is not None else None
        if outside is not None:
            logits.masked_fill_(outside, _OUT)
        return logits, outside

    def tempered(self, tile: Tensor, rows: slice) -> Tensor:
        """A tile over the temperature, in place."""
        return tile if self.inverse_temperature is None else tile.mul_(self.inverse_temperature[rows, None])

    def _outside(self, rows: slice, columns: slice) -> Tensor:
        assert self.support is not None
        offsets = self.support.offsets[rows.start : rows.stop + 1]
        counts = offsets.diff()
        ids = self.support.ids[int(offsets[0]) : int(offsets[-1])] - self.shard.start - columns.start
        row_of_id = torch.repeat_interleave(torch.arange(counts.shape[0], device=ids.device), counts)
        width = columns.stop - columns.start
        local = (ids >= 0) & (ids < width)
        outside = (counts > 0)[:, None].expand(counts.shape[0], width).clone()
        outside[row_of_id[local], ids[local]] = False
        return outside

    def here(self, ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Where the tile holds `ids` (global token ids), and their column in it, clamped into range."""
        local = ids - self.shard.start - columns.start
        width = columns.stop - columns.start
        return (local >= 0) & (local < width), local.clamp(0, width - 1)


@dataclass(frozen=True)
class _Sums:
    """What a softmax needs of the vocabulary seen so far, by row, relative to the largest logit so far.

    Relative, because small entropies would drown in the rounding of a large normaliser.
    """

    largest: Tensor
    weight: Tensor
    """Sum of exp(logit - largest)."""
    weighted: Tensor
    """Sum of exp(logit - largest) (logit - largest)."""
    target: Tensor
    """Logit of the target, 0 where it was not seen."""
    further: Tensor
    """[r, k] logits of the further tokens, 0 where not seen."""

    @classmethod
    def empty(cls, hidden: Tensor, num_further: int) -> _Sums:
        rows, options = hidden.shape[0], {"dtype": _sum_dtype(hidden), "device": hidden.device}
        weight, weighted, target = torch.zeros(3, rows, **options)
        largest = torch.full((rows,), _OUT, **options)
        return cls(largest, weight, weighted, target, torch.zeros(rows, num_further, **options))

    def add_tile(self, rows: slice, logits: Tensor) -> None:
        """Take in the logits [r, c] of a tile, which are overwritten."""
        largest = torch.maximum(self.largest[rows], logits.amax(-1))
        self._move(rows, largest)
        shifted = logits.sub_(largest[:, None])
        weights = shifted.exp()
        self.weight[rows] += weights.sum(-1)
        self.weighted[rows] += shifted.mul_(weights).sum(-1)

    def _move(self, rows: slice, largest: Tensor) -> None:
        shift = self.largest[rows] - largest
        scale = shift.exp()
        self.weighted[rows] = scale * (self.weighted[rows] + shift * self.weight[rows])
        self.weight[rows] *= scale
        self.largest[rows] = largest

    def merge_over(self, shard: VocabShard) -> None:
        """Take in the other shards of the vocabulary, in place."""
        if shard.group is None:
            return
        self._move(slice(None), shard.max_(self.largest.clone()))
        for part in (self.weight, self.weighted, self.target, self.further):
            shard.sum_(part)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left @ right, the sum and the result in the dtype of `into`, whatever that of the factors."""
    if left.dtype == into.dtype:
        into.addmm_(left, right)
    elif left.is_cuda:
        into += torch.mm(left, right, out_dtype=into.dtype)
    else:
        into.addmm_(left.to(into.dtype), right.to(into.dtype))


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: _Job) -> tuple[Tensor, Tensor, Tensor]:
        sums = _Sums.empty(hidden, 0 if job.ids is None else job.ids.shape[1])
        for rows in job.row_blocks():
            for columns in job.column_blocks(weight):
                logits, _ = job.logits(hidden, weight, rows, columns)
                owned, column = job.here(job.targets[rows], columns)
                sums.target[rows] += logits.gather(-1, column[:, None])[:, 0].masked_fill_(~owned, 0.0)
                if job.ids is not None:
                    owned, column = job.here(job.ids[rows], columns)
                    sums.further[rows] += logits.gather(-1, column).masked_fill_(~owned, 0.0)
                sums.add_tile(rows, logits)
        sums.merge_over(job.shard)
        log_sum = sums.weight.log()
        entropy = log_sum - sums.weighted / sums.weight
        ctx.save_for_backward(hidden, weight, sums.largest + log_sum, entropy)
        ctx.job = job
        ctx.set_materialize_grads(False)
        further = sums.further - sums.largest[:, None] - log_sum[:, None]
        ctx.mark_non_differentiable(further)
        return sums.target - sums.largest - log_sum, entropy, further

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None]:
        hidden, weight, log_norm, entropy = ctx.saved_tensors
        job: _Job = ctx.job
        logprob_grad, entropy_grad = (_nonzero(grad) for grad in grads[:2])
        hidden_grad = torch.zeros(hidden.shape, dtype=log_norm.dtype, device=hidden.device)
        weight_grad = torch.zeros(weight.shape, dtype=log_norm.dtype, device=weight.device)
        for rows in job.row_blocks():
            factors = job.wide(hidden[rows])
            for columns in job.column_blocks(weight):
                logits, outside = job.logits(hidden, weight, rows, columns)
                log_p = logits.sub_(log_norm[rows, None])
                grad = _logit_grad(job, (rows, columns), log_p, (logprob_grad, entropy_grad), entropy)
                if outside is not None:
                    grad.masked_fill_(outside, 0.0)
                grad = job.tempered(grad, rows).to(factors.dtype)
                _add_product(hidden_grad[rows], grad, job.wide(weight[columns]))
                _add_product(weight_grad[columns], grad.t(), factors)
        return hidden_grad.to(hidden.dtype), weight_grad.to(weight.dtype), None


def _nonzero(grad: Tensor | None) -> Tensor | None:
    """None where there is nothing to pass on: outputs that are stacked get zeros for those that no loss reads."""
    return grad if grad is not None and bool(grad.any()) else None


def _logit_grad(
    job: _Job, tile: tuple[slice, slice], log_p: Tensor, grads: tuple[Tensor | None, Tensor | None], entropy: Tensor
) -> Tensor:
    """[r, c] gradient of the logits of a tile before the temperature; `log_p` is overwritten."""
    rows, columns = tile
    logprob_grad, entropy_grad = grads
    p = log_p.exp()
    if entropy_grad is None:
        grad = p if logprob_grad is None else p.mul_(-logprob_grad[rows, None])
        if logprob_grad is None:
            return grad.zero_()
    else:
        # dH/dz = -p (log p + H), dlogprob/dz = 1[target] - p
        grad = log_p.add_(entropy[rows, None]).mul_(entropy_grad[rows, None])
        if logprob_grad is not None:
            grad += logprob_grad[rows, None]
        grad = grad.mul_(p).neg_()
    if logprob_grad is not None:
        owned, column = job.here(job.targets[rows], columns)
        grad.scatter_add_(1, column[:, None], logprob_grad[rows].masked_fill(~owned, 0.0)[:, None])
    return grad


@dataclass(frozen=True)
class HeadSettings:
    """How the product of hidden states and output weights is made."""

    in_float32: bool = False
    """Multiply float32 copies of the factors (of one tile at a time) where the model has fewer bits; else logits are
    rounded to the model's dtype, as an engine of that dtype rounds its own."""
    tile_elements: int | None = None
    """Bound on logits that exist at a time; None: by device."""
    tile_rows: int | None = None
    """Bound on the rows of a tile that does not hold the whole vocabulary; None: by device."""

    def tile(self, rows: int, vocab: int, device: torch.device) -> tuple[int, int]:
        """Rows and columns of a tile: whole rows of the vocabulary where many fit, else a part of both."""
        elements = self.tile_elements or TILE_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]
        least = min(rows, self.tile_rows or TILE_ROWS["cpu" if device.type == "cpu" else "cuda"], elements)
        if least * vocab <= elements:
            return elements // vocab, vocab
        return max(1, least), max(1, elements // max(1, least))


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    support: PackedSupport | None = None,
    shard: VocabShard | None = None,
    head: HeadSettings | None = None,
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
        head: Number format of the product, and sizes of the tiles.
    """
    logprobs, entropy, _ = _apply(hidden, weight, (targets, None), temperature, _Settings(support, shard, head))
    return logprobs, entropy


def linear_top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: tuple[Tensor, Tensor],
    temperature: Tensor,
    *,
    support: PackedSupport | None = None,
    shard: VocabShard | None = None,
    head: HeadSettings | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `linear_logprobs`, and from the same logits the log-probabilities of further tokens, without gradient.

    Args:
        hidden: [r, h].
        weight: [v, h].
        targets: [r] int64, and the further tokens [r, k] int64; what is no token id gets a value without meaning.
        temperature: [r].
        support: as there.
        shard: as there.
        head: as there.

    Returns:
        Log-probabilities [r] and entropies [r] with gradient, log-probabilities of the further tokens [r, k].
    """
    return _apply(hidden, weight, targets, temperature, _Settings(support, shard, head))


@dataclass(frozen=True)
class _Settings:
    support: PackedSupport | None
    shard: VocabShard | None
    head: HeadSettings | None


def _apply(
    hidden: Tensor, weight: Tensor, targets: tuple[Tensor, Tensor | None], temperature: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor]:
    head = settings.head or HeadSettings()
    job = _Job(
        targets=targets[0],
        inverse_temperature=None if bool((temperature == 1).all()) else temperature.to(_sum_dtype(hidden)).reciprocal(),
        support=settings.support,
        shard=settings.shard or VocabShard(),
        tile=head.tile(hidden.shape[0], weight.shape[0], hidden.device),
        in_float32=head.in_float32,
        ids=targets[1],
    )
    return _LinearLogprob.apply(hidden, weight, job)  # pyright: ignore[reportReturnType] apply is untyped
