"""After a pass: what one pipeline stage knows, given to all. Collectives run here, never inside the schedule."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.mcore.parallel import ParallelState
from moerl.mcore.router_replay import Observation
from moerl.mcore.wire import gather_json

FLOAT_FIELDS = 2
"""Of `Observation`, over experts: log_probs and selection."""


class StageExchange:
    """Shares scores of the last stage and routers' observations of every stage over the pipeline axis."""

    def __init__(self, parallel: ParallelState, layers: tuple[int, ...], sizes: tuple[int, int]) -> None:
        """`layers`: positions, among all MoE layers, of this stage's, in the order of its observations.

        `sizes`: experts, and experts per token.
        """
        self._axis = parallel.pp
        self._num_experts, self._topk = sizes
        self._stages: list[tuple[int, ...]] = [layers]
        if self._axis.size > 1:
            self._stages = [tuple(stage) for stage in gather_json(layers, self._axis.group)]

    def scores(self, scores: Tensor | None, size: tuple[int, int], device: torch.device) -> Tensor:
        """Those of the last stage, of `size` [rows, t], on every stage."""
        last = self._axis.size - 1
        if self._axis.rank != last:
            scores = torch.empty(size, device=device)
        assert scores is not None
        return self._broadcast(scores, last)

    def observation(self, mine: Observation | None, num_tokens: int, device: torch.device) -> Observation | None:
        """All MoE layers' observations in their order; None where the network has no MoE layer."""
        if self._axis.size == 1 or not any(self._stages):
            return mine
        total = sum(len(stage) for stage in self._stages)
        own = torch.empty(num_tokens, total, self._topk, dtype=torch.int64, device=device)
        floats = torch.empty(FLOAT_FIELDS, num_tokens, total, self._num_experts, device=device)
        for rank, positions in enumerate(self._stages):
            if not positions:
                continue
            where = list(positions)
            routes, values = own[:, where], floats[:, :, where]
            if rank == self._axis.rank:
                assert mine is not None
                routes, values = mine.own_routes, torch.stack([mine.log_probs, mine.selection])
            own[:, where] = self._broadcast(routes, rank)
            floats[:, :, where] = self._broadcast(values, rank)
        return Observation(own, floats[0], floats[1])

    def _broadcast(self, tensor: Tensor, stage: int) -> Tensor:
        if self._axis.size == 1 or not tensor.numel():  # a filler's: every stage knows that there is nothing
            return tensor
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=dist.get_process_group_ranks(self._axis.group)[stage], group=self._axis.group)
        return tensor
