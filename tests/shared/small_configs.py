"""config.json of a small model of every registered family, and a folder with random weights, without transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from moerl.models.disk import disk_tensors
from moerl.models.family import family_of
from moerl.tensor_file import Described, TensorFileWriter

COMMON: dict[str, Any] = {
    "head_dim": 6,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "vocab_size": 22,
}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 12}
OWN_WIDTH: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
QWEN: dict[str, Any] = {**EXPERTS, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0]}
SHARED: dict[str, Any] = {
    **EXPERTS,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "head_dim": None,
    "kv_lora_rank": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
WIDE: dict[str, Any] = {"head_dim": 2, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**SHARED, **LATENT, "norm_topk_prob": False, "topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **SHARED,
            **LATENT,
            "num_nextn_predict_layers": 1,
            "rope_scaling": {**YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            **SHARED,
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**SHARED, **LATENT, "mlp_layer_types": ["dense", "sparse"]}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **OWN_WIDTH,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {**YARN, "rope_type": "yarn", "truncate": False},
            "sliding_window": 8,
            "swiglu_limit": 7.0,
        },
    ),
    "llama": (
        "LlamaForCausalLM",
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}, "pretraining_tp": 1},
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {
            **OWN_WIDTH,
            "attn_type_list": [1, 1],
            "mtp_transformer_layers": 1,
            "num_mtp_modules": 3,
            "rotary_dim": 4,
            "use_mtp": True,
        },
    ),
    "mixtral": ("MixtralForCausalLM", OWN_WIDTH),
    "olmoe": ("OlmoeForCausalLM", WIDE),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**QWEN, "shared_expert_intermediate_size": 20}),
    "qwen3": ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 2}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**QWEN, "rope_theta": None, "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1e4}},
    ),
}
"""Family -> architecture, and its fields beside `COMMON`."""


def small_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of the small model of a family."""
    architecture, fields = SMALL[family]
    return {"architectures": [architecture], **COMMON, **fields, **changes}


def save_random(folder: Path, family: str, **changes: Any) -> Path:
    """A Hugging Face folder of `small_config` with random weights in one file, in the order of the rules."""
    hf = small_config(family, **changes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    generator = torch.Generator().manual_seed(5)
    tensors = list(disk_tensors(family_of(hf), hf))
    described = [Described(tensor.name, torch.float32, tensor.shape) for tensor in tensors]
    with TensorFileWriter(folder / "model.safetensors", described) as writer:
        for tensor in tensors:
            writer.add(torch.randn(math.prod(tensor.shape), generator=generator).reshape(tensor.shape))
    return folder
