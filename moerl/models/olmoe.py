"""OLMoE (1B-7B): norms of queries and keys over all heads, a softmax router whose top-k weights are not renormalised.

`intermediate_size` is the experts'.
"""

from __future__ import annotations

from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import plain_rope_theta, positive, refuse_active, refuse_unknown, required
from moerl.models.moe_decoder import (
    COMMON_FIELDS,
    DecoderFamily,
    DecoderShape,
    attention_sizes,
    check_topk,
    decoder_kwargs,
)

_KNOWN = (COMMON_FIELDS - {"moe_intermediate_size"}) | {"attention_bias", "clip_qkv", "num_experts"}


@families.register(
    "olmoe",
    NoArguments,
    architectures=("OlmoeForCausalLM",),
    covers=("tied", "routed experts", "q/k norm over all heads"),
    verified=EXACT,
)
class Olmoe(DecoderFamily):
    """The family."""

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked; clipped projections (`clip_qkv`) are another attention."""
        refuse_unknown(hf, _KNOWN)
        refuse_active(hf, "hidden_act", ("silu",))
        refuse_active(hf, "attention_bias")
        refuse_active(hf, "clip_qkv", (None,))
        width = positive(hf, "intermediate_size")
        sizes = attention_sizes({**hf, "moe_intermediate_size": width})
        if sizes["heads"] * sizes["head_dim"] != sizes["hidden"]:
            raise CheckpointError(
                f"config.json: {sizes['heads']} heads of {sizes['head_dim']} are not hidden_size {sizes['hidden']}, "
                "which the norms of queries and keys are as wide as in this family"
            )
        experts = positive(hf, "num_experts", "num_local_experts")
        check_topk(sizes["topk"], experts, "num_experts")
        return DecoderShape(
            **sizes,
            experts=experts,
            is_moe=(True,) * sizes["layers"],
            is_tied=required(hf, bool, "tie_word_embeddings"),
            has_qk_norm=True,
            has_wide_qk_norm=True,
        )

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings; renormalised top-k weights would be a softmax over the chosen logits."""
        return decoder_kwargs(self.shape(hf), hf) | {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not required(hf, bool, "norm_topk_prob"),
            "rotary_base": plain_rope_theta(hf),
            "rotary_percent": 1.0,
        }
