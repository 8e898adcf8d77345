"""After a pass: what one pipeline stage knows, given to all. Collectives run here, never inside the schedule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.mcore.parallel import ParallelState
from moerl.mcore.wire import gather_json


class StageExchange:
    """Shares scores of the last stage and what every stage kept of its routers over the pipeline axis."""

    def __init__(self, parallel: ParallelState, layers: tuple[int, ...]) -> None:
        """`layers`: positions, among all MoE layers, of this stage's, in the order of its observations."""
        self._axis = parallel.pp
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

    @property
    def has_layers(self) -> bool:
        """Whether any stage has an MoE layer."""
        return any(self._stages)

    def whole(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this stage kept of its MoE layers, [x, its layers, ...] by name -> the same of all of them, in order."""
        return {name: self._whole(tensor) for name, tensor in mine.items()}

    def _whole(self, mine: Tensor) -> Tensor:
        if self._axis.size == 1:
            return mine
        rows, _, *rest = mine.shape
        whole = mine.new_empty(rows, sum(map(len, self._stages)), *rest)
        for rank, positions in enumerate(self._stages):
            if positions:
                part = mine if rank == self._axis.rank else mine.new_empty(rows, len(positions), *rest)
                whole[:, list(positions)] = self._broadcast(part, rank)
        return whole

    def _broadcast(self, tensor: Tensor, stage: int) -> Tensor:
        if self._axis.size == 1 or not tensor.numel():  # a filler's: every stage knows that there is nothing
            return tensor
        tensor = tensor.contiguous()
        data = tensor.flatten().view(torch.uint8)  # neither gloo nor NCCL knows int16
        dist.broadcast(data, src=dist.get_process_group_ranks(self._axis.group)[stage], group=self._axis.group)
        return tensor
