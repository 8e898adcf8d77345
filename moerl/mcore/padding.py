"""Rows that fill a pack up to what the layout divides it by. They exist inside one forward only."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moerl.mcore.parallel import ParallelState
from moerl.types import MicroBatch

Routes = tuple[Tensor | None, Tensor | None]
"""Routes to replay [t, l, k] and which rows have one [t] bool; (None, None): own choice."""


FILLER = -1
"""Sample id of the rows that fill up."""


def missing_rows(num_tokens: int, parallel: ParallelState) -> int:
    """How many rows a pack of `num_tokens` lacks: under sequence parallelism every rank takes an equal share."""
    return -num_tokens % parallel.tp.size if parallel.is_sequence_parallel else 0


def filled_up(batch: MicroBatch, rows: int) -> MicroBatch:
    """What a forward reads of `batch`, with one more sequence of `rows` tokens at its end.

    Only the fields that the network reads are longer; those of the loss keep their [t].
    """
    if not rows:
        return batch
    places = torch.arange(rows, device=batch.position_ids.device, dtype=batch.position_ids.dtype)
    support = batch.support
    if support is not None:
        support = replace(support, offsets=F.pad(support.offsets, (0, rows), value=int(support.offsets[-1])))
    return replace(
        batch,
        sample_ids=(*batch.sample_ids, FILLER),
        token_ids=F.pad(batch.token_ids, (0, rows)),
        position_ids=torch.cat([batch.position_ids, places]),
        cu_seqlens=torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + rows]),
        seq_ids=F.pad(batch.seq_ids, (0, rows), value=batch.num_seqs),
        temperature=F.pad(batch.temperature, (0, rows), value=1.0),
        support=support,
        rollout_top_ids=None if (top := batch.rollout_top_ids) is None else F.pad(top, (0, 0, 0, rows), value=-1),
    )


def filled_up_routes(routes: Tensor, has_route: Tensor | None, rows: int, num_experts: int) -> Routes:
    """Routes to replay [t, l, k] and which rows have one [t], with `rows` more that take the experts in turn, so that
    rows without meaning load no expert more than another.
    """
    if not rows:
        return routes, has_route
    tokens, layers, topk = routes.shape
    first = torch.arange(tokens, tokens + rows, device=routes.device)[:, None] * topk
    turns = (first + torch.arange(topk, device=routes.device)) % num_experts
    more = turns[:, None].expand(rows, layers, topk).to(routes.dtype)
    return torch.cat([routes, more]), None if has_route is None else F.pad(has_route, (0, rows), value=True)
