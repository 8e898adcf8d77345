"""Logits of the learner, which makes them tile by tile and keeps none: whole rows, from the pass that scores tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moerl.mcore.model import unwrap
from moerl.mcore.policy import MegatronPolicy
from moerl.mcore.rows import plan_rows
from moerl.types import MicroBatch


def logprobs_and_logits(policy: MegatronPolicy, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
    """Of one forward by the routers' own choice: (logprobs [t] of the tokens, logits [t, v], row j after token j).

    What goes into the head is taken on its way; megatron's output layer then multiplies it and gathers the vocabulary
    over the tensor axis, in a collective call of the last stage's ranks. On other stages the logits are None.
    """
    heads = [model for model in map(unwrap, policy._runner._chunks) if model.post_process]
    kept: list[Tensor] = []
    norms: list[Any] = [head.decoder.final_layernorm for head in heads]
    handles = [norm.register_forward_hook(lambda _module, _inputs, hidden: kept.append(hidden)) for norm in norms]
    try:
        logprobs = policy.logprobs(micro)
    finally:
        for handle in handles:
            handle.remove()
    if not heads:
        return logprobs, None
    (head,), (hidden,) = heads, kept
    weight = head.shared_embedding_or_output_weight() if head.share_embeddings_and_output_weights else None
    with torch.no_grad():
        rows, _ = head.output_layer(hidden, weight=weight, runtime_gather_output=True)
    tokens = plan_rows(micro.cu_seqlens, policy.parallel.row_cut).by_token(rows[:, 0])
    return logprobs, tokens[:, : head.true_vocab_size]
