"""One forward of a model that nobody trains: what a checkpoint says about given tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.mcore.model import ModelSource, build_chunks, transformer_config
from moerl.mcore.optim import wrap_chunks
from moerl.mcore.parallel import initialize_parallel
from moerl.mcore.step import StepRunner, own_routes
from moerl.mcore.weights import WeightMap
from moerl.models.family import refuse_unproven
from moerl.types import MicroBatch, TokenWeights


def forward_once(
    source: ModelSource, token_ids: Tensor, probes: Tensor, *, allowed: Iterable[str] = ()
) -> tuple[Tensor, Tensor | None]:
    """Load the model in float32 into one process and run one sequence through it.

    Args:
        source: configuration and weights.
        token_ids: [t] int64.
        probes: [k] int64, tokens whose logprobs are wanted after each token.
        allowed: regular expressions of tensors that may be left out.

    Returns:
        Logprobs [t - 1, k] float32 of the probes after each token but the last, and the experts [t, l, topk] int64 of
        every MoE layer; None where there is none.

    Raises:
        CheckpointError: weights that do not fill the model.
        ConfigError: a model that cannot be built here.
    """
    refuse_unproven(source.family)
    layout = initialize_parallel(ParallelSection(), 0)
    section = ModelSection(path=str(source.folder))
    config = transformer_config(source, section=section, precision=PrecisionSection(), parallel=layout)
    chunks = build_chunks(source, config, layout)
    WeightMap(source, chunks, layout).load_hf(allowed=allowed)
    runner = StepRunner(wrap_chunks(chunks, config, OptimSection()), layout, source.kwargs)
    device = torch.device(torch.cuda.current_device())
    batch = _micro_batch(token_ids.to(device), probes.to(device))
    (result,) = runner.forward([batch], own_routes, observe=True)
    assert result.top_logprobs is not None
    routes = None if result.observed is None else result.observed.own_routes.cpu()
    return result.top_logprobs[1:].cpu(), routes


def _micro_batch(token_ids: Tensor, probes: Tensor) -> MicroBatch:
    length = len(token_ids)
    zeros = torch.zeros(length, device=token_ids.device)
    top_ids = probes.expand(length, -1)
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
        rollout_top_ids=top_ids,
        rollout_top_logprobs=torch.zeros(top_ids.shape, device=token_ids.device),
    )
