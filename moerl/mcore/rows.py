"""Which token every row of a forward carries: rows that fill up, the cut over the context axis, and the way back.

Under context parallelism a pack is cut in one of two ways. The zigzag lengthens each sequence to a multiple of
2 * context and cuts it into as many chunks; rank r takes chunks r and 2 * context - 1 - r, so that causal attention
costs every rank the same (megatron's and TransformerEngine's convention). It suits long sequences; of short ones it
adds many rows. Or sequences stay whole, and each lies on one rank. Under sequence parallelism the tensor axis cuts each
rank's rows into equal parts once more. Rows without a token exist inside one forward only.

"Context order" is the order of a gather over the context axis: the rows of rank 0, then those of rank 1, and so on.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moerl.types import MicroBatch, PackedSupport

Routes = tuple[Tensor | None, Tensor | None]
"""Routes to replay [t, l, k] and which rows have one [t] bool; (None, None): own choice."""

NONE = -1
"""The token of a row that carries none."""

ZIGZAG, WHOLE, AUTO = "zigzag", "whole", "auto"
"""Cuts over the context axis; `AUTO`: the zigzag, or whole sequences where they fill up with fewer rows, and the zigzag
with more than `FILLED` of its tokens."""
FILLED = 0.01
"""Below it the zigzag, which divides the work of attention evenly, is worth its rows."""


class RowCut(NamedTuple):
    """How a layout cuts the rows of a pack."""

    context_rank: int = 0
    context_size: int = 1
    tensor_size: int = 1
    """1 without sequence parallelism."""
    context_cut: str = ZIGZAG
    """`ZIGZAG`, `WHOLE` or `AUTO`."""

    @property
    def sequence_multiple(self) -> int:
        """Of every sequence's length in the zigzag."""
        return 2 * self.context_size if self.context_size > 1 else 1

    @property
    def rank_multiple(self) -> int:
        """Of the rows of a rank: the tensor axis cuts them, and megatron's rotation halves them over a context axis."""
        return self.tensor_size if self.context_size == 1 else math.lcm(2, self.tensor_size)

    @property
    def pack_multiple(self) -> int:
        """Of the rows of a pack: every rank has equally many."""
        return self.context_size * self.rank_multiple


@dataclass(frozen=True)
class RowPlan:
    """The rows of one pack: m of this context rank, all_rows over the context axis."""

    cut: RowCut
    is_whole: bool
    """Whether each sequence lies on one rank of the context axis."""
    cu_seqlens: Tensor
    """[n + 1] int32: in rows of this rank where sequences are whole, of the context axis where all ranks have a part of
    each. With one sequence more where the rank or the pack is filled up."""
    token: Tensor
    """[m] int64: the token of each row, `NONE` for a row that fills up."""
    turn: Tensor
    """[m] int64: of the rows without a token, in the order of the whole pack, which one this is."""
    position: Tensor
    """[m] int64: in its sequence."""
    sequence: Tensor
    """[m] int64."""
    row_of_place: Tensor
    """[all_rows] int64, in context order."""
    row_of_token: Tensor
    """[t] int64, in context order."""

    @property
    def num_tokens(self) -> int:
        """t."""
        return self.row_of_token.shape[0]

    @property
    def num_rows(self) -> int:
        """Over the context axis."""
        return self.row_of_place.shape[0]

    @property
    def has_filler(self) -> bool:
        """Whether a row of any rank carries no token."""
        return self.num_rows > self.num_tokens

    @property
    def is_filler(self) -> Tensor:
        """[m] bool."""
        return self.token == NONE

    def carry(self, values: Tensor) -> Tensor:
        """[t, ...] of tokens -> [m, ...] of rows; a row without a token has those of token 0, or 0 without any."""
        if not self.num_tokens:
            return values.new_zeros(len(self.token), *values.shape[1:])
        if self.cut.context_size == 1 and not self.has_filler:
            return values
        return values.index_select(0, self.token.clamp_min(0))

    def by_token(self, rows: Tensor) -> Tensor:
        """[all_rows, ...] in context order -> [t, ...]."""
        if self.cut.context_size == 1:
            return rows[: self.num_tokens]
        return rows.index_select(0, self.row_of_token)

    def by_predicted(self, rows: Tensor, position_ids: Tensor) -> Tensor:
        """[all_rows, c] in context order -> [t, c]: entry j from the row of token j - 1; 0 at first tokens.

        `position_ids` [t]: 0 at first tokens.
        """
        shifted = F.pad(self.row_of_token, (1, 0))[:-1]
        return rows.index_select(0, shifted).masked_fill((position_ids == 0)[:, None], 0.0)

    def replayed(self, routes: Tensor, has_route: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor | None]:
        """Routes [t, l, k] and which tokens have one [t] -> the same of rows.

        Rows that fill up take the experts in turn, so that they load no expert more than another.
        """
        carried = self.carry(routes)
        present = None if has_route is None else self.carry(has_route)
        if not self.has_filler:
            return carried, present
        topk = routes.shape[2]
        turns = (self.turn[:, None] * topk + torch.arange(topk, device=routes.device)) % num_experts
        filler = self.is_filler
        carried = torch.where(filler[:, None, None], turns[:, None].to(routes.dtype), carried)
        return carried, None if present is None else present | filler


def plan_rows(cu_seqlens: Tensor, cut: RowCut) -> RowPlan:
    """The rows of a pack with bounds `cu_seqlens` [n + 1], as seen from the rank of `cut`.

    A pack without a sequence (a filler) has as few rows as the layout can cut, none of which carries a token. Ranks of
    the context axis, which see the same bounds, cut alike.
    """
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    padded = (lengths + cut.sequence_multiple - 1) // cut.sequence_multiple * cut.sequence_multiple
    rest = -int(padded.sum()) % cut.pack_multiple if len(lengths) else cut.pack_multiple
    if dealt := _dealt(lengths, cut, int(padded.sum()) + rest):
        return _whole_rows(cu_seqlens, dealt, cut)
    if rest:
        lengths, padded = F.pad(lengths, (0, 1)), F.pad(padded, (0, 1), value=rest)
    starts = F.pad(padded.cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(torch.arange(len(padded), device=bounds.device), padded)
    places = torch.arange(len(sequence), device=bounds.device)
    position = places - starts[sequence]
    token = torch.where(position < lengths[sequence], bounds[sequence] + position, NONE)
    order = row_of_place = places
    if cut.context_size > 1:
        chunk = position // (padded // cut.sequence_multiple)[sequence]
        owner = torch.minimum(chunk, cut.sequence_multiple - 1 - chunk)
        order = torch.argsort(owner, stable=True)
        row_of_place = torch.empty_like(order).scatter_(0, order, places)
    share = len(order) // cut.context_size
    mine = order[cut.context_rank * share : (cut.context_rank + 1) * share]
    return RowPlan(
        cut=cut,
        is_whole=cut.context_size == 1,
        cu_seqlens=starts.to(cu_seqlens.dtype),
        token=token[mine],
        turn=_turns(token)[mine],
        position=position[mine],
        sequence=sequence[mine],
        row_of_place=row_of_place,
        row_of_token=row_of_place[token != NONE],
    )


def _dealt(all_lengths: Tensor, cut: RowCut, zigzag_rows: int) -> list[list[int]] | None:
    """The sequences of each rank of the context axis, where they stay whole: the longest first, each to the rank with
    the fewest tokens so far. None: the zigzag.
    """
    if cut.context_size == 1 or cut.context_cut == ZIGZAG:
        return None
    lengths = all_lengths.tolist()
    if cut.context_cut == AUTO and zigzag_rows <= (1 + FILLED) * sum(lengths):
        return None
    ranks: list[list[int]] = [[] for _ in range(cut.context_size)]
    loads = [(0, rank) for rank in range(cut.context_size)]
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = loads[0]
        ranks[rank].append(sequence)
        heapq.heapreplace(loads, (load + lengths[sequence], rank))
    rows = cut.context_size * _share(max(loads)[0], cut)
    return None if cut.context_cut == AUTO and rows >= zigzag_rows else ranks


def _share(load: int, cut: RowCut) -> int:
    """Rows of each rank, where the one with the most tokens has `load`."""
    return max(1, -(-load // cut.rank_multiple)) * cut.rank_multiple


def _whole_rows(cu_seqlens: Tensor, dealt: Sequence[Sequence[int]], cut: RowCut) -> RowPlan:
    """The rows of a pack whose sequences lie whole on the ranks that `dealt` says."""
    device, bounds = cu_seqlens.device, cu_seqlens.tolist()
    lengths = [last - first for first, last in itertools.pairwise(bounds)]
    share = _share(max(sum(lengths[i] for i in own) for own in dealt), cut)
    first, long, owners = [], [], []
    for rank, own in enumerate(dealt):
        rest = share - sum(lengths[i] for i in own)
        first += [bounds[i] for i in own] + [NONE] * (rest > 0)
        long += [lengths[i] for i in own] + [rest] * (rest > 0)
        owners += [rank] * (len(own) + (rest > 0))
    sizes = torch.tensor(long, device=device)
    sequence = torch.repeat_interleave(torch.arange(len(long), device=device), sizes)
    places = torch.arange(len(sequence), device=device)
    position = places - F.pad(sizes.cumsum(0), (1, 0))[sequence]
    start = torch.tensor(first, device=device)[sequence]
    token = torch.where(start == NONE, NONE, start + position)
    live = token != NONE
    is_own = torch.tensor(owners, device=device) == cut.context_rank
    mine = slice(cut.context_rank * share, (cut.context_rank + 1) * share)
    return RowPlan(
        cut=cut,
        is_whole=True,
        cu_seqlens=F.pad(sizes[is_own].cumsum(0), (1, 0)).to(cu_seqlens.dtype),
        token=token[mine],
        turn=_turns(token)[mine],
        position=position[mine],
        sequence=sequence[mine] - sequence[mine][0],
        row_of_place=places,
        row_of_token=torch.empty_like(token[live]).scatter_(0, token[live], places[live]),
    )


def _turns(token: Tensor) -> Tensor:
    return (token == NONE).cumsum(0) - 1


@dataclass(frozen=True)
class Predictions:
    """What each row of this context rank predicts, the token after its own: looked up in the whole pack, then cut.

    A row whose token is the last of its sequence, or that carries none, has entries without meaning.
    """

    rows: RowPlan
    position_ids: Tensor
    """[t] of the pack."""
    targets: Tensor
    """[m] int64."""
    temperature: Tensor
    """[m] float32."""
    support: PackedSupport | None
    """By row."""
    top_ids: Tensor | None
    """[m, k] int64: further tokens to give the log-probability of."""


def predictions(batch: MicroBatch, rows: RowPlan) -> Predictions:
    """Of the rows of `batch`."""
    if batch.is_filler:
        targets, ones = rows.carry(batch.token_ids), torch.ones_like(rows.token, dtype=batch.temperature.dtype)
        return Predictions(rows, batch.position_ids, targets, ones, support=None, top_ids=None)
    following = rows.token + 1
    following = torch.where(rows.is_filler | (following >= rows.num_tokens), 0, following)
    top = batch.rollout_top_ids
    return Predictions(
        rows=rows,
        position_ids=batch.position_ids,
        targets=batch.token_ids[following],
        temperature=batch.temperature[following],
        support=None if batch.support is None else _supports(batch.support, following),
        top_ids=None if top is None else top[following],
    )


def _supports(support: PackedSupport, tokens: Tensor) -> PackedSupport:
    """The supports of `tokens` [m], one after another."""
    counts = support.offsets.diff()[tokens]
    offsets = F.pad(counts.cumsum(0), (1, 0))
    shift = torch.repeat_interleave(support.offsets[tokens] - offsets[:-1], counts)
    return PackedSupport(support.ids[torch.arange(len(shift), device=shift.device) + shift], offsets)
