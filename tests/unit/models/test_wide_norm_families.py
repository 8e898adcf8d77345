"""OLMoE and MiniMax-M2 as released, and what their configurations may not say."""

from __future__ import annotations

from typing import Any

import pytest

from moerl.errors import CheckpointError
from moerl.models.family import WIDE_QK_NORM, family_of

OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 50304,
}
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def settings(hf: dict[str, Any], **changes: Any) -> dict[str, Any]:
    hf = {name: value for name, value in {**hf, **changes}.items() if value is not ...}
    return family_of(hf).transformer_kwargs(hf)


def parameters(hf: dict[str, Any]) -> int:
    """Of the whole model."""
    total = 0
    for rule in family_of(hf).weight_rules(hf):
        for shape in rule.hf_shapes:
            rows = 1
            for size in shape:
                rows *= size
            total += rows
    return total


def test_released_settings():
    olmoe, minimax = settings(OLMOE), settings(MINIMAX)
    assert olmoe[WIDE_QK_NORM] is minimax[WIDE_QK_NORM] is True
    assert olmoe["qk_layernorm"] is minimax["qk_layernorm"] is True
    assert (olmoe["moe_router_score_function"], olmoe["moe_router_pre_softmax"]) == ("softmax", True)
    assert minimax["moe_router_score_function"] == "sigmoid"
    assert minimax["moe_router_enable_expert_bias"] is True
    assert (minimax["rotary_base"], minimax["rotary_percent"]) == (5e6, 0.5)


def test_sizes_are_the_published_ones():
    """6.92 billion parameters of OLMoE-1B-7B, 230 billion of MiniMax-M2."""
    assert round(parameters(OLMOE) / 1e9, 2) == 6.92
    assert 228e9 < parameters(MINIMAX) < 230e9


@pytest.mark.parametrize("place", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_both_spellings_of_a_partial_rotation_agree(place):
    assert settings(MINIMAX, **place) == settings(MINIMAX) == settings(MINIMAX, rotary_dim=..., **place)


@pytest.mark.parametrize(
    ("hf", "changes", "told"),
    [
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv"),
        (OLMOE, {"attention_bias": True}, "attention_bias"),
        (OLMOE, {"head_dim": 64}, "16 heads of 64 are not hidden_size 2048"),
        (OLMOE, {"norm_topk_prob": ...}, "norm_topk_prob is missing"),
        (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX, {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func"),
        (MINIMAX, {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta"),
        (MINIMAX, {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        (MINIMAX, {"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}}, "contradict"),
        (MINIMAX, {"rotary_dim": ...}, "partial_rotary_factor is missing"),
        (MINIMAX, {"partial_rotary_factor": 0.25}, "contradict"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(hf, changes, told):
    with pytest.raises(CheckpointError, match=told):
        settings(hf, **changes)
