"""Megatron's DDP and optimizer, the learning-rate schedule, clipping, and the check for NaN before a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.config.schema import OptimSection
from moerl.errors import ConfigError, NumericsError
from moerl.mcore.balancing import BiasBalancing
from moerl.mcore.parallel import ParallelState
from moerl.metrics import Last, Max, Mean, Metrics, Sum


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate by step (a batch of rollouts, all its minibatches alike)."""

    lr: float
    min_lr: float
    warmup_steps: int
    kind: str
    decay_start: int
    decay_end: int

    @classmethod
    def of(cls, section: OptimSection, num_steps: int) -> Schedule:
        """From the configuration.

        Raises:
            ConfigError: an unknown schedule, or a decay that ends before it starts.
        """
        if section.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"optim.schedule is {section.schedule!r}; allowed: constant, linear, cosine")
        start = max(section.constant_steps, section.warmup_steps)
        end = num_steps if section.decay_steps is None else section.decay_steps
        if section.schedule != "constant" and end < start:
            raise ConfigError(
                f"optim.decay_steps is {end}, before the decay starts at step {start} (warmup_steps, "
                "constant_steps); raise it"
            )
        min_lr = section.lr * section.min_lr_fraction
        return cls(section.lr, min_lr, section.warmup_steps, section.schedule, start, end)

    def at(self, step: int) -> float:
        """Rate of step `step`, counted from 0: the warm-up reaches `lr` at its last step."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant" or step <= self.decay_start:
            return self.lr
        if step >= self.decay_end:
            return self.min_lr
        done = (step - self.decay_start) / (self.decay_end - self.decay_start)
        share = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * share


def wrap_chunks(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, optim: OptimSection, *, overlap: bool = False
) -> list[DistributedDataParallel]:
    """Megatron's DDP around every chunk; gradients are accumulated and averaged over dp x cp in float32.

    `overlap` reduces them while the last micro-batch's backward still runs. The schedule must then know how to hold the
    reduction back until that one (`no_sync_func`): without it every micro-batch's sum would be reduced again.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=optim.distributed
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]
    if overlap:
        hold = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = hold[0] if len(hold) == 1 else hold  # pyright: ignore[reportAttributeAccessIssue] megatron takes both
    return wrapped


@contextmanager
def minibatch_of(model: str, index: int, count: int) -> Iterator[None]:
    """Completes a NumericsError by where in the step it came, and by what the step had done to `model` before."""
    try:
        yield
    except NumericsError as error:
        before = "no minibatch of this step was applied"
        if index:
            earlier = "minibatch 1" if index == 1 else f"minibatches 1 to {index}"
            before = f"{earlier} of this step had been applied in memory"
        raise NumericsError(
            f"minibatch {index + 1} of {count} of the {model}: {error}, so it was not applied; {before}"
        ) from error


class Optimizer:
    """Megatron's optimizer with moerl's schedule and finiteness check."""

    def __init__(
        self,
        section: OptimSection,
        chunks: list[DistributedDataParallel],
        parallel: ParallelState,
        *,
        num_steps: int,
        bias_update_rate: float = 0.0,
    ) -> None:
        """Over the parameters of `chunks` that require gradients; the balancing bias of their routers moves with every
        step where `bias_update_rate` is not 0.

        Raises:
            ConfigError: an unknown optimizer or schedule, or one that cannot be distributed or offloaded.
        """
        _check(section)
        self.schedule = Schedule.of(section, num_steps)
        self._weight_decay = section.weight_decay
        self.chunks = chunks
        self.parallel = parallel
        self._balancing = BiasBalancing(chunks, bias_update_rate, parallel)
        dtype = chunks[0].config.params_dtype
        settings = OptimizerConfig(
            optimizer=section.name,
            lr=section.lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.eps,
            sgd_momentum=0.0,
            clip_grad=section.clip_grad_norm,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=section.distributed,
            optimizer_cpu_offload=section.cpu_offload,
            optimizer_offload_fraction=1.0 if section.cpu_offload else 0.0,
        )
        self.inner: Any = get_megatron_optimizer(settings, chunks)  # pyright: ignore[reportArgumentType] DDP is a MegatronModule

    def zero_grad(self) -> None:
        """Clear gradients and their buffers, and begin to count the loads of experts anew."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()
        self._balancing.begin()

    @torch.no_grad()
    def complete_gradients(self) -> None:
        """Every rank's buffers hold every gradient; the distributed optimizer leaves each rank its share alone."""
        for chunk in self.chunks:
            if not chunk.ddp_config.use_distributed_optimizer:
                continue
            buffers: Any = chunk.buffers
            for buffer in [*buffers, *chunk.expert_parallel_buffers]:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    shares = bucket.grad_data.view(group.size(), -1)
                    dist.all_gather_into_tensor(bucket.grad_data, shares[group.rank()].clone(), group=group)

    def step(self, losses: Sequence[Tensor], step: int) -> Metrics:
        """Check `losses` (one per micro-batch; none on ranks without the loss) and the gradient norm, then clip and
        step.

        Raises:
            NumericsError: either is not finite; on every rank, before any weight moved.
        """
        self.inner.prepare_grads()
        norm = self.inner.get_grad_norm()
        norm = (
            norm
            if torch.is_tensor(norm)
            else torch.tensor(norm, dtype=torch.float32, device=torch.cuda.current_device())
        )
        total = torch.stack(list(losses)).sum() if losses else torch.zeros_like(norm)
        if not self.parallel.all_true(torch.isfinite(norm.squeeze()) & torch.isfinite(total)):
            raise NumericsError(f"loss {float(total)} and gradient norm {float(norm)}: one is not finite")
        rate = self.schedule.at(step)
        for group in self.inner.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        succeeded, _, _ = self.inner.step()
        assert succeeded
        self._balancing.step()
        size = norm.detach().squeeze()
        return {
            "optim/grad_norm": Mean(size),
            "optim/grad_norm_max": Max(size),
            "optim/lr": Last(rate),
            "optim/updates": Sum(1.0 / self.parallel.dp.size),  # one rank of a context axis speaks
        }


def _check(section: OptimSection) -> None:
    if section.name not in ("adam", "sgd"):
        raise ConfigError(f"optim.name is {section.name!r}; allowed: adam, sgd")
    if section.distributed and section.name != "adam":
        raise ConfigError(
            f"optim.distributed is true with optim.name={section.name}, which has no state to distribute (megatron "
            "distributes Adam alone); set optim.distributed=false"
        )
    if section.cpu_offload and not section.distributed:
        raise ConfigError(
            "optim.cpu_offload is true without optim.distributed: megatron offloads what its distributed optimizer "
            "holds; set optim.distributed=true"
        )
    if section.cpu_offload and not torch.cuda.is_available():
        raise ConfigError(
            "optim.cpu_offload is true, but there is no GPU here whose memory it could relieve; set it to false"
        )
