"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biases on q, k, v; softmax router; a gated shared expert."""

from __future__ import annotations

from typing import Any

from moerl.models.family import HFConfig, NoArguments, families
from moerl.models.hf_config import plain_rope_theta, refuse_active, refuse_unknown, required
from moerl.models.moe_decoder import (
    DecoderFamily,
    DecoderShape,
    attention_sizes,
    check_topk,
    decoder_kwargs,
    refuse_other_attention,
    sparse_step_layers,
)

_KNOWN = frozenset(
    {
        "decoder_sparse_step",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "partial_rotary_factor",
        "qkv_bias",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "shared_expert_intermediate_size",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)


def _read_shape(hf: HFConfig) -> DecoderShape:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "use_sliding_window")
    refuse_active(hf, "hidden_act", ("silu",))
    refuse_other_attention(hf)
    sizes = attention_sizes(hf)
    experts = required(hf, int, "num_experts", "num_local_experts")
    check_topk(sizes["topk"], experts, "num_experts")
    return DecoderShape(
        **sizes,
        experts=experts,
        is_moe=sparse_step_layers(hf, sizes["layers"]),
        is_tied=required(hf, bool, "tie_word_embeddings"),
        # The first released files say nothing of it: the class had biases before it had the field.
        has_qkv_bias=True if hf.get("qkv_bias") is None else required(hf, bool, "qkv_bias"),
        shared_width=required(hf, int, "shared_expert_intermediate_size"),
        shared_name="shared_expert",
        shared_gate="shared_expert_gate",
    )


@families.register("qwen2_moe", NoArguments, architectures=("Qwen2MoeForCausalLM",))
class Qwen2Moe(DecoderFamily):
    """The family."""

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        return _read_shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings; the released models do not renormalise their top-k weights (`norm_topk_prob` false)."""
        return decoder_kwargs(_read_shape(hf), hf) | {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not required(hf, bool, "norm_topk_prob"),
            "rotary_base": plain_rope_theta(hf),
            "rotary_percent": 1.0,
        }
