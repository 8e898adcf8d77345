"""What both generations of Qwen's MoE models share: which layers have experts, a softmax router, the rotation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from moerl.errors import CheckpointError
from moerl.models.family import HFConfig
from moerl.models.hf_config import (
    listed,
    positive,
    refuse_active,
    refuse_other_attention,
    refuse_unknown,
    required,
)
from moerl.models.moe_decoder import (
    COMMON_FIELDS,
    DecoderFamily,
    DecoderShape,
    attention_sizes,
    check_topk,
    decoder_kwargs,
)
from moerl.models.yarn import yarn_or_plain_rope

QWEN_FIELDS = COMMON_FIELDS | frozenset(
    {
        "decoder_sparse_step",
        "layer_types",
        "max_window_layers",
        "mlp_only_layers",
        "num_experts",
        "sliding_window",
        "use_sliding_window",
    }
)
"""Of config.json, which both generations read or check."""


class QwenMoe(DecoderFamily):
    """Either generation."""

    known: ClassVar[frozenset[str]]
    """Fields of config.json that it reads or checks."""

    @abstractmethod
    def own_shape(self, hf: HFConfig) -> dict[str, Any]:
        """The fields of `DecoderShape` that the other generation does not have.

        Raises:
            CheckpointError: as `shape`.
        """

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        refuse_unknown(hf, self.known)
        refuse_active(hf, "use_sliding_window")
        refuse_active(hf, "hidden_act", ("silu",))
        refuse_other_attention(hf)
        sizes = attention_sizes(hf)
        experts = positive(hf, "num_experts", "num_local_experts")
        check_topk(sizes["topk"], experts, "num_experts")
        return DecoderShape(
            **sizes,
            **self.own_shape(hf),
            experts=experts,
            is_moe=_sparse_step_layers(hf, sizes["layers"]),
            is_tied=required(hf, bool, "tie_word_embeddings"),
        )

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings; renormalised top-k weights (`norm_topk_prob`) are a softmax over the chosen logits."""
        return (
            decoder_kwargs(self.shape(hf), hf)
            | yarn_or_plain_rope(hf)
            | {
                "moe_router_score_function": "softmax",
                "moe_router_pre_softmax": not required(hf, bool, "norm_topk_prob"),
            }
        )


def _sparse_step_layers(hf: HFConfig, layers: int) -> tuple[bool, ...]:
    """Layer i is MoE when the step divides i + 1 and i is not listed: another phase than Megatron's integer form.

    Raises:
        CheckpointError: a step below 1, or a list of anything but layers that exist.
    """
    step = positive(hf, "decoder_sparse_step")
    dense = set(listed(hf, "mlp_only_layers", int))
    outside = sorted(dense - set(range(layers)))
    if outside:
        raise CheckpointError(f"config.json: mlp_only_layers names {outside}, but there are only {layers} layers")
    return tuple((i + 1) % step == 0 and i not in dense for i in range(layers))
