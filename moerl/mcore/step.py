"""Forward and backward of a minibatch through megatron's schedules, and the one line that scales a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moerl.errors import DataError
from moerl.mcore.gpu import uses_transformer_engine
from moerl.mcore.model import score_tokens, unwrap
from moerl.mcore.parallel import ParallelState
from moerl.mcore.router_replay import Keep, nothing_seen
from moerl.mcore.rows import ZIGZAG, Routes, plan_rows
from moerl.mcore.stages import StageExchange
from moerl.metrics import Mean, Metrics
from moerl.models.flops import BACKWARD, forward_flops
from moerl.types import MicroBatch


@dataclass(frozen=True)
class TokenScores:
    """What the model says about one micro-batch."""

    logprobs: Tensor
    """[t] float32."""
    entropy: Tensor
    """[t] float32."""
    top_logprobs: Tensor | None = None
    """[t, k] float32, of the engine's likeliest tokens where the batch has them; without gradient."""


LossFunction = Callable[[MicroBatch, TokenScores], tuple[Tensor, Metrics]]
"""The objective of one micro-batch (0-dim, a plain sum) and its metrics."""


@dataclass(frozen=True)
class MicroResult:
    """One micro-batch after a pass, without graph; the same on every pipeline stage, save loss and metrics."""

    logprobs: Tensor
    """[t] float32."""
    entropy: Tensor
    """[t] float32."""
    kept: Mapping[str, Tensor]
    """What the pass kept of its observations, [x, l, ...] of all MoE layers; {} where it kept nothing."""
    loss: Tensor | None
    """None on ranks without the last stage."""
    metrics: Metrics
    top_logprobs: Tensor | None = None
    """[t, k] float32, where the batch has the engine's likeliest tokens."""
    padding: Mean = field(default_factory=lambda: Mean(0.0, 0.0))
    """Share of the forward's rows that carried no token."""


class _Pass:
    """One call of the schedule: hands out micro-batches, collects results."""

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        replay: Callable[[MicroBatch], Routes],
        parallel: ParallelState,
        *,
        keep: Keep | None,
        scale: int,
        sizes: tuple[int, int] = (0, 0),
    ) -> None:
        """`sizes`: experts, and experts per token; of no use where nothing is kept."""
        self.micro_batches = micro_batches
        self.replay = replay
        self.parallel = parallel
        self.keep = keep
        self.scale = scale
        self.sizes = sizes
        self.loss_function: LossFunction | None = None
        self.kept: list[dict[int, dict[str, Tensor]]] = [{} for _ in micro_batches]
        self.scores: list[Tensor | None] = [None] * len(micro_batches)
        self.losses: list[Tensor | None] = [None] * len(micro_batches)
        self.metrics: list[Metrics] = [{} for _ in micro_batches]
        self.padding: list[Mean] = [Mean(0.0, 0.0)] * len(micro_batches)

    def forward_step(self, iterator: Iterator[int], module: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        index = next(iterator)
        batch = self.micro_batches[index]
        model = unwrap(module)
        cut = self.parallel.row_cut
        if uses_transformer_engine(model.config.params_dtype):  # its attention and core's rotation know no other
            cut = cut._replace(context_cut=ZIGZAG)
        rows = plan_rows(batch.cu_seqlens, cut)
        self.padding[index] = Mean(float(rows.num_rows - rows.num_tokens), float(rows.num_rows))
        rearm = model.routes.begin(rows, *self.replay(batch), observe=self.keep is not None)
        output = score_tokens(module, batch, rows)
        if self.keep is not None:
            # At once: an observation is as large as the tokens times all experts of all layers.
            with torch.no_grad():
                seen = model.routes.observed(rows) or nothing_seen(batch.num_tokens, self.sizes, output.device)
                self.kept[index][model.vp_stage or 0] = self.keep(batch, seen, model.routes.layers)
        if output.requires_grad:
            # Fires when this micro-batch's backward reaches this chunk, before anything of it is computed again.
            output.register_hook(lambda _: rearm())
        return output, lambda out: self._finish(index, out)

    def _finish(self, index: int, output: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        batch = self.micro_batches[index]
        logprobs, entropy, *_ = output.unbind(0)
        self.scores[index] = output.detach()
        tokens = torch.ones((), dtype=torch.int, device=output.device)
        if self.loss_function is None:
            return output.new_zeros(()), tokens, {}
        if batch.is_filler:  # 0, with a graph: its backward pass must run, since collectives of other ranks wait for it
            nothing = output.sum()
            self.losses[index] = nothing.detach().clone()
            return nothing, tokens, {}
        loss, metrics = self.loss_function(batch, TokenScores(logprobs, entropy, _top(output, batch)))
        self.losses[index], self.metrics[index] = loss.detach().clone(), metrics
        # The one scaling line: core divides by the number of micro-batches and DDP averages over dp x cp; the objective
        # is a sum.
        return loss * self.scale, tokens, metrics

    def result(self, index: int, exchange: StageExchange) -> MicroResult:
        tokens = self.micro_batches[index].token_ids
        batch = self.micro_batches[index]
        scores = self.scores[index]
        rows = 2 if batch.rollout_top_ids is None else 2 + batch.rollout_top_ids.shape[1]
        scores = exchange.scores(scores, (rows, tokens.shape[0]), tokens.device)
        logprobs, entropy, *_ = scores.unbind(0)
        kept = exchange.whole(_join_chunks(self.kept[index]))
        self.kept[index] = {}
        return MicroResult(
            logprobs,
            entropy,
            kept,
            self.losses[index],
            self.metrics[index],
            top_logprobs=_top(scores, batch),
            padding=self.padding[index],
        )


def _top(scores: Tensor, batch: MicroBatch) -> Tensor | None:
    """[t, k] of `scores` [2 + k, t]."""
    return None if batch.rollout_top_ids is None else scores[2:].detach().t()


def _join_chunks(kept: Mapping[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """By model chunk -> over the layers of all of them, in the order of the chunks."""
    parts = [kept[stage] for stage in sorted(kept)]
    if len(parts) <= 1:
        return parts[0] if parts else {}
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


class StepRunner:
    """Runs micro-batches through this rank's chunks."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        parallel: ParallelState,
        shape: Mapping[str, Any],
        *,
        has_head: bool = True,
    ) -> None:
        """`chunks` share one TransformerConfig; `shape` are the family's settings, `has_head` whether it ends in the
        vocabulary.
        """
        self._chunks: list[torch.nn.Module] = list(chunks)
        self.parallel = parallel
        config = chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        layers = tuple(position for chunk in chunks for position in unwrap(chunk).routes.layers)
        self._sizes = (config.num_moe_experts or 0, config.moe_router_topk)
        self._exchange = StageExchange(parallel, layers)
        self._shape, self._has_head = shape, has_head
        self._flops = 0.0

    def take_flops(self) -> float:
        """Operations of the model's passes over this data rank's tokens since the last call (`models/flops.py`)."""
        flops, self._flops = self._flops, 0.0
        return flops

    def _count(self, micro_batches: Sequence[MicroBatch], passes: int) -> None:
        lengths = [length for batch in micro_batches for length in batch.cu_seqlens.diff().tolist()]
        self._flops += passes * forward_flops(self._shape, lengths, has_head=self._has_head).forward

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        replay: Callable[[MicroBatch], Routes],
        *,
        keep: Keep | None = None,
        counts: bool = True,
    ) -> list[MicroResult]:
        """Score without gradient and without dropout.

        `keep`: what to keep of the routers, nothing without it; `counts`: among the operations that the algorithm asks
        for.
        """
        if counts:
            self._count(micro_batches, 1)
        return self._run(self._pass(micro_batches, replay, keep, scale=1))

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        replay: Callable[[MicroBatch], Routes],
        *,
        keep: Keep | None = None,
    ) -> list[MicroResult]:
        """Add the gradient of the summed losses, over all ranks, to the gradient buffers.

        A micro-batch's `keep` is called before its `loss_function`, in the same process where there is no pipeline.
        """
        self._count(micro_batches, 1 + BACKWARD)
        scale = len(micro_batches) * self.parallel.dp_cp.size
        work = self._pass(micro_batches, replay, keep, scale=scale)
        work.loss_function = loss_function
        return self._run(work)

    def _pass(
        self,
        micro_batches: Sequence[MicroBatch],
        replay: Callable[[MicroBatch], Routes],
        keep: Keep | None,
        *,
        scale: int,
    ) -> _Pass:
        keep = keep if self._exchange.has_layers else None
        return _Pass(micro_batches, replay, self.parallel, keep=keep, scale=scale, sizes=self._sizes)

    def _run(self, work: _Pass) -> list[MicroResult]:
        is_training = work.loss_function is not None
        for chunk in self._chunks:
            chunk.train(is_training)
        count = len(work.micro_batches)
        iterators = [iter(range(count)) for _ in self._chunks]
        is_interleaved = len(self._chunks) > 1
        with nullcontext() if is_training else torch.no_grad():
            get_forward_backward_func()(
                forward_step_func=work.forward_step,
                data_iterator=iterators if is_interleaved else iterators[0],
                model=self._chunks if is_interleaved else self._chunks[0],
                num_microbatches=count,
                seq_length=max(1, *(batch.num_tokens for batch in work.micro_batches)),
                micro_batch_size=1,
                forward_only=not is_training,
            )
        results = [work.result(index, self._exchange) for index in range(count)]
        for chunk in self._chunks:
            unwrap(chunk).routes.release()
        return results


def own_routes(batch: MicroBatch) -> Routes:
    """Replay nothing."""
    return None, None


def rollout_routes(batch: MicroBatch) -> Routes:
    """Replay what the engine recorded (R3)."""
    if batch.is_filler:
        return None, None
    if batch.routes is None:
        raise DataError("algorithm.routing is R3, but the samples carry no routes; use an engine that returns them")
    return batch.routes, batch.has_route
