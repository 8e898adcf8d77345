"""Ranks and groups by name: `ParallelState` is made once and passed to whoever needs it.

The only file that talks to megatron's global `parallel_state`.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore

from moerl.config.schema import ParallelSection
from moerl.config.stages import StageSplit
from moerl.errors import ConfigError
from moerl.mcore.gpu import keep_float32_exact, keep_groups_apart, own_device, queue_in_order
from moerl.mcore.rows import AUTO, RowCut
from moerl.mcore.wire import gather_json


@dataclass(frozen=True, slots=True)
class Axis:
    """One parallel axis, seen from this rank."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class ParallelState:
    """Every axis of the layout; sizes multiply to the world size within the dense part and within the expert part."""

    dp: Axis
    """Data."""
    dp_cp: Axis
    """Data and context together: the ranks that DDP averages gradients over."""
    tp: Axis
    """Tensor."""
    pp: Axis
    """Pipeline."""
    cp: Axis
    """Context."""
    ep: Axis
    """Expert."""
    etp: Axis
    """Expert tensor."""
    tokens: Axis
    """Tensor, data and context together: the ranks whose routers, in one stage, see different tokens."""
    virtual_pipeline: int | None
    """Model chunks per rank; None without interleaving."""
    world_size: int
    rank: int
    dispatcher: str = "alltoall"
    """How tokens reach their experts, in megatron's words."""
    overlaps_grad_reduce: bool = False
    """Whether gradients are reduced while the backward still runs."""
    context_cut: str = AUTO
    """How the context axis cuts a pack: `parallel.context_cut`."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def split(self) -> StageSplit:
        """Which layers lie on which stage."""
        ends = {"first": self.first_stage_layers, "last": self.last_stage_layers}
        return StageSplit(pipeline=self.pp.size, virtual=self.virtual_pipeline or 1, **ends)

    @property
    def is_sequence_parallel(self) -> bool:
        """Megatron trains MoE layers under tensor parallelism only with sequence parallelism."""
        return self.tp.size > 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, where the loss is."""
        return self.pp.rank == self.pp.size - 1

    @property
    def expert_dp_size(self) -> int:
        """How many ranks hold the same experts, and average their gradients."""
        return self.world_size // (self.etp.size * self.ep.size * self.pp.size)

    @property
    def microbatch_multiple(self) -> int:
        """Megatron's interleaved schedule takes whole rounds of micro-batches, one for each stage."""
        return self.pp.size if self.virtual_pipeline else 1

    @property
    def row_cut(self) -> RowCut:
        """How the rows of a pack are cut for this rank."""
        return RowCut(
            self.cp.rank, self.cp.size, self.tp.size if self.is_sequence_parallel else 1, context_cut=self.context_cut
        )

    def router_rows(self, num_rows: int) -> slice:
        """Which of this context rank's rows its routers see: all, or this rank's slice under sequence parallelism."""
        if not self.is_sequence_parallel:
            return slice(0, num_rows)
        share = num_rows // self.tp.size
        return slice(self.tp.rank * share, (self.tp.rank + 1) * share)

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """What every rank's routers saw -> [all_rows, ...] in context order, without gradient."""
        if self.is_sequence_parallel:
            rows = _gather(rows, self.tp)
        return _gather(rows, self.cp)

    def all_true(self, flag: torch.Tensor) -> bool:
        """Whether `flag` [] bool holds on every rank; every rank gets the same answer."""
        if self.world_size == 1:
            return bool(flag)
        value = flag.to(torch.int32)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return bool(value)

    def union(self, names: set[str]) -> set[str]:
        """The names of all ranks."""
        if self.world_size == 1:
            return names
        return set().union(*gather_json(sorted(names)))

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the data-parallel ranks, in place."""
        if self.dp.size > 1:
            dist.all_reduce(value, group=self.dp.group)
        return value

    def gather_over_data(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Every data-parallel rank's `value` [n], in rank order; n may differ between ranks."""
        if self.dp.size == 1:
            return [value]
        counts = [torch.zeros(1, dtype=torch.int64, device=value.device) for _ in range(self.dp.size)]
        dist.all_gather(counts, torch.tensor([len(value)], device=value.device), group=self.dp.group)
        longest = int(torch.cat(counts).max())
        parts = [value.new_zeros(longest) for _ in range(self.dp.size)]
        padded = torch.cat([value, value.new_zeros(longest - len(value))])
        dist.all_gather(parts, padded, group=self.dp.group)
        return [part[: int(count)] for part, count in zip(parts, counts, strict=True)]


def initialize_parallel(section: ParallelSection, seed: int) -> ParallelState:
    """Join the process group (torchrun's, or alone without it), build megatron's groups, seed its RNG tracker.

    Called again with the same sizes it returns the same layout and seeds anew, so a process may build several policies.

    Raises:
        ConfigError: sizes that do not fit the world size, or differ from those already set up in this process.
    """
    join_world(section)
    keep_float32_exact()
    world = dist.get_world_size()
    _check_sizes(section, world)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=section.tensor,
            pipeline_model_parallel_size=section.pipeline,
            virtual_pipeline_model_parallel_size=section.virtual_pipeline,
            context_parallel_size=section.context,
            expert_model_parallel_size=section.expert,
            expert_tensor_parallel_size=section.expert_tensor,
            distributed_timeout_minutes=section.timeout_seconds / 60,  # pyright: ignore[reportArgumentType] a timedelta's
        )
    state = _describe(section, world)
    asked = (section.tensor, section.pipeline, section.context, section.expert, section.expert_tensor)
    have = tuple(axis.size for axis in (state.tp, state.pp, state.cp, state.ep, state.etp))
    if asked != have:
        raise ConfigError(
            f"parallel: (tensor, pipeline, context, expert, expert_tensor) = {asked}, but this process already runs "
            f"{have}; one process holds one layout"
        )
    model_parallel_cuda_manual_seed(seed)
    return state


def release_parallel() -> None:
    """Forget the layout, so that this process may build another; policies of the old one must not be used again.

    Its groups are closed, which megatron leaves open: on gloo each keeps threads that wake up to look for work.
    """
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        with suppress(ValueError):  # megatron has closed it
            dist.destroy_process_group(group)
    gc.collect()  # policies and their optimizers refer to each other, and so to the groups


def join_world(section: ParallelSection) -> None:
    """Join the process group that the launcher started, or be alone; once for a process.

    Raises:
        ConfigError: more processes on this machine than GPUs.
    """
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        keep_groups_apart(os.environ)
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            own = own_device(os.environ, torch.cuda.device_count())
            queue_in_order(section, os.environ, torch.cuda.get_device_capability(own)[0])
            torch.cuda.set_device(own)
        dist.init_process_group(backend, timeout=timedelta(seconds=section.timeout_seconds))
        return
    # Alone: a store in memory needs neither a port nor a file that another process could take.
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _check_sizes(section: ParallelSection, world: int) -> None:
    sizes = {
        "tensor": section.tensor,
        "pipeline": section.pipeline,
        "context": section.context,
        "expert": section.expert,
        "expert_tensor": section.expert_tensor,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"parallel.{name} is {size}; it must be at least 1")
    dense = section.tensor * section.pipeline * section.context
    expert = section.expert_tensor * section.expert * section.pipeline
    for names, product in (("tensor x pipeline x context", dense), ("expert_tensor x expert x pipeline", expert)):
        if world % product:
            raise ConfigError(f"parallel: {names} = {product} does not divide the {world} processes of this run")


def _gather(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    if axis.size == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(axis.size)]
    dist.all_gather(parts, rows.contiguous(), group=axis.group)
    return torch.cat(parts)


def _axis(group: Any) -> Axis:
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))


def _describe(section: ParallelSection, world: int) -> ParallelState:
    return ParallelState(
        dp=_axis(parallel_state.get_data_parallel_group()),
        dp_cp=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        tp=_axis(parallel_state.get_tensor_model_parallel_group()),
        pp=_axis(parallel_state.get_pipeline_model_parallel_group()),
        cp=_axis(parallel_state.get_context_parallel_group()),
        ep=_axis(parallel_state.get_expert_model_parallel_group()),
        etp=_axis(parallel_state.get_expert_tensor_parallel_group()),
        tokens=_axis(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        virtual_pipeline=section.virtual_pipeline,
        world_size=world,
        rank=dist.get_rank(),
        dispatcher=section.dispatcher,
        overlaps_grad_reduce=section.overlap_grad_reduce,
        context_cut=section.context_cut,
        first_stage_layers=section.first_stage_layers,
        last_stage_layers=section.last_stage_layers,
    )


def rng_tracker_states() -> dict[str, torch.Tensor]:
    """States of megatron's named RNGs (dropout in sharded regions), for a checkpoint."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    return dict(tracker.get_states())


def set_rng_tracker_states(states: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_tracker_states` returned."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    tracker.set_states(states)


def reseed(seed: int) -> None:
    """Seed torch and megatron's named RNGs as a fresh start does."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
