"""What makes another family of a shape that tests write down as a Qwen3-MoE."""

from __future__ import annotations

from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FAMILIES = {
    "qwen2": {
        "model_type": "qwen2_moe",
        "num_experts": 7,
        "shared_expert_intermediate_size": 18,
        "num_key_value_heads": 3,
        "head_dim": None,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
    "glm": {
        "model_type": "glm4_moe",
        "n_routed_experts": 7,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.4,
    },
    "glm_groups": {
        "model_type": "glm4_moe",
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.8,
    },
    "qwen3": {
        "model_type": "qwen3",
        **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")),
    },
    "llama": {
        "model_type": "llama",
        **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")),
        "hidden_size": 36,
        "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_experts": None,
        "num_local_experts": 6,
        "moe_intermediate_size": None,
        "intermediate_size": 22,
        "norm_topk_prob": None,
    },
}
"""Changes to such a shape; None takes a key away."""
CLASSES = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
