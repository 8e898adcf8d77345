"""One forward of a model that nobody trains: what a checkpoint says about given tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.mcore import moe_stats
from moerl.mcore.model import ModelSource, PackedGPTModel, build_chunks, transformer_config, unwrap
from moerl.mcore.optim import wrap_chunks
from moerl.mcore.parallel import initialize_parallel
from moerl.mcore.step import StepRunner, own_routes
from moerl.mcore.weights import WeightMap
from moerl.models.family import refuse_unproven
from moerl.types import MicroBatch, TokenWeights


@dataclass(frozen=True)
class Outcome:
    """What one model made of tokens; on the CPU."""

    hidden: Tensor
    """[t, h] float32: what goes into the head after each token."""
    head: Tensor
    """[v, h] float32: logits are `hidden @ head.T`; whole rows of them are the caller's to make, as many as fit."""
    routes: Tensor | None
    """[t, l, topk] int64: experts of every MoE layer; None where there is none."""


class _OpenModel(PackedGPTModel):
    """Keeps what goes into its head."""

    into_head: tuple[Tensor, Tensor] | None = None

    def score_hidden(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **others: Any
    ) -> Tensor:
        """As `PackedGPTModel`."""
        weight = output_layer.weight if output_weight is None else output_weight
        self.into_head = hidden_states[:, 0], weight[: self.true_vocab_size]
        return super().score_hidden(
            hidden_states=hidden_states, output_layer=output_layer, output_weight=output_weight, **others
        )


def forward_once(source: ModelSource, token_ids: Tensor, *, allowed: Iterable[str] = ()) -> Outcome:
    """Load the model in float32 into one process and run one sequence through it.

    Args:
        source: configuration and weights.
        token_ids: [t] int64.
        allowed: regular expressions of tensors that may be left out.

    Raises:
        CheckpointError: weights that do not fill the model.
        ConfigError: a model that cannot be built here.
    """
    refuse_unproven(source.family)
    layout = initialize_parallel(ParallelSection(), 0)
    section = ModelSection(path=str(source.folder))
    config = transformer_config(source, section=section, precision=PrecisionSection(), parallel=layout)
    chunks = build_chunks(source, config, layout, _OpenModel)
    WeightMap(source, chunks, layout).load_hf(allowed=allowed)
    runner = StepRunner(wrap_chunks(chunks, config, OptimSection()), layout, source.kwargs)
    device = torch.device(torch.cuda.current_device())
    (result,) = runner.forward([_micro_batch(token_ids.to(device))], own_routes, keep=moe_stats.keep_choice)
    model = unwrap(chunks[0])
    assert isinstance(model, _OpenModel)
    assert model.into_head is not None
    # copies: parameters may be views of one buffer of all of them, which would live on
    hidden, head = (tensor.detach().cpu().clone() for tensor in model.into_head)
    routes = result.kept["own_routes"].long().cpu() if result.kept else None
    return Outcome(hidden, head, routes)


def _micro_batch(token_ids: Tensor) -> MicroBatch:
    length = len(token_ids)
    zeros = torch.zeros(length, device=token_ids.device)
    return MicroBatch(
        sample_ids=(0,),
        token_ids=token_ids,
        position_ids=torch.arange(length, device=token_ids.device),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32, device=token_ids.device),
        seq_ids=torch.zeros(length, dtype=torch.int64, device=token_ids.device),
        group_ids=torch.zeros(1, dtype=torch.int64, device=token_ids.device),
        rewards=torch.zeros(1, device=token_ids.device),
        mask=torch.ones(length, dtype=torch.bool, device=token_ids.device),
        rollout_logprobs=zeros,
        advantages=zeros,
        temperature=torch.ones(length, device=token_ids.device),
        weights=TokenWeights.shared(zeros),
    )
