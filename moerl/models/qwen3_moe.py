"""Qwen3-MoE (30B-A3B, 235B-A22B): grouped-query attention with per-head q/k norm, softmax router, no shared expert."""

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
        "attention_bias",
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
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)


def _read_shape(hf: HFConfig) -> DecoderShape:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "attention_bias")
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
        has_qk_norm=True,
    )


@families.register("qwen3_moe", NoArguments, architectures=("Qwen3MoeForCausalLM",))
class Qwen3Moe(DecoderFamily):
    """The family."""

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        return _read_shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings; renormalised top-k weights (`norm_topk_prob`) are a softmax over the chosen logits."""
        return decoder_kwargs(_read_shape(hf), hf) | {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not required(hf, bool, "norm_topk_prob"),
            "rotary_base": plain_rope_theta(hf),
            "rotary_percent": 1.0,
        }
