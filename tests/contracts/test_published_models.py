"""Published models by their config.json: parameters as published, and every tensor that transformers would have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moerl.models.disk import disk_tensors
from moerl.models.family import family_of
from moerl.models.hf_folder import InMemory, checked_source

QWEN3 = dict(
    architectures=["Qwen3MoeForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    initializer_range=0.02,
    max_position_embeddings=40960,
    mlp_only_layers=[],
    model_type="qwen3_moe",
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    num_key_value_heads=4,
    output_router_logits=False,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1e6,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
QWEN2 = dict(
    architectures=["Qwen2MoeForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151643,
    hidden_act="silu",
    initializer_range=0.02,
    model_type="qwen2_moe",
    norm_topk_prob=False,
    output_router_logits=False,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    router_aux_loss_coef=0.001,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
GLM4 = dict(
    architectures=["Glm4MoeForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=[151329, 151336, 151338],
    head_dim=128,
    hidden_act="silu",
    initializer_range=0.02,
    max_position_embeddings=131072,
    model_type="glm4_moe",
    n_group=1,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=96,
    num_experts_per_tok=8,
    num_key_value_heads=8,
    num_nextn_predict_layers=1,
    pad_token_id=151329,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=1000000,
    tie_word_embeddings=False,
    topk_group=1,
    torch_dtype="bfloat16",
    use_cache=True,
    vocab_size=151552,
)
DEEPSEEK = dict(
    architectures=["DeepseekV3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    aux_loss_alpha=0.001,
    bos_token_id=0,
    eos_token_id=1,
    ep_size=1,
    hidden_act="silu",
    hidden_size=7168,
    initializer_range=0.02,
    intermediate_size=18432,
    kv_lora_rank=512,
    model_type="deepseek_v3",
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    pretraining_tp=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    scoring_func="sigmoid",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_method="noaux_tc",
    torch_dtype="bfloat16",
    use_cache=True,
    v_head_dim=128,
)
GPT_OSS = dict(
    architectures=["GptOssForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=200002,
    experts_per_token=4,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    initial_context_length=4096,
    initializer_range=0.02,
    intermediate_size=2880,
    max_position_embeddings=131072,
    model_type="gpt_oss",
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_key_value_heads=8,
    output_router_logits=False,
    pad_token_id=199999,
    rms_norm_eps=1e-5,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    use_cache=True,
    vocab_size=201088,
)


@dataclass(frozen=True)
class Published:
    """A config.json, and what its authors say of the model, in billions."""

    config: dict[str, Any]
    total: float
    active: float
    not_active: tuple[str, ...] = ()
    """What the authors do not count as active: how megatron names begin."""


MODELS = {
    "gpt-oss-20b": Published(
        {
            **GPT_OSS,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
        },
        20.91,
        3.61,
        not_active=("embedding.",),
    ),
    "gpt-oss-120b": Published(
        {
            **GPT_OSS,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
        },
        116.83,
        5.13,
        not_active=("embedding.",),
    ),
    "DeepSeek-V3": Published(
        {
            **DEEPSEEK,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 163840,
            "n_group": 8,
            "n_routed_experts": 256,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "vocab_size": 129280,
        },
        671,
        36.7,
    ),
    "Kimi-K2": Published(
        {
            **DEEPSEEK,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "model_type": "kimi_k2",
            "n_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "rope_scaling": {
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
            "vocab_size": 163840,
        },
        1026,
        32.6,
    ),
    "Moonlight-16B-A3B": Published(
        {
            **DEEPSEEK,
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
            "vocab_size": 163840,
        },
        15.96,
        2.24,
        not_active=("embedding.", "output_layer."),
    ),
    "Qwen3-30B-A3B": Published(
        {
            **QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 48,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
        },
        30.53,
        3.35,
    ),
    "Qwen3-235B-A22B": Published(
        {
            **QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 94,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
        235.09,
        22.2,
    ),
    "Qwen1.5-MoE-A2.7B": Published(
        {
            **QWEN2,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
        },
        14.32,
        2.69,
    ),
    "Qwen2-57B-A14B": Published(
        {
            **QWEN2,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "moe_intermediate_size": 2560,
            "num_attention_heads": 28,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "shared_expert_intermediate_size": 20480,
        },
        57.41,
        14.2,
    ),
    "GLM-4.5": Published(
        {
            **GLM4,
            "first_k_dense_replace": 3,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "num_hidden_layers": 92,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
        355,
        32,
        not_active=("embedding.", "output_layer."),
    ),
    "GLM-4.5-Air": Published(
        {
            **GLM4,
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_hidden_layers": 46,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
        106,
        12,
        not_active=("embedding.", "output_layer."),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_published(name):
    model = MODELS[name]
    family = family_of(model.config)
    settings = family.transformer_kwargs(model.config)
    total = active = 0.0
    for rule in family.weight_rules(model.config):
        count = math.prod(rule.megatron_shape())
        total += count
        if not rule.megatron_name.startswith(model.not_active):
            active += count * (settings["moe_router_topk"] / settings["num_moe_experts"] if rule.is_expert else 1)
    assert total / 1e9 == pytest.approx(model.total, rel=0.01)
    assert active / 1e9 == pytest.approx(model.active, rel=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_that_transformers_has_is_read_under_the_hub_s_names(name):
    """The model without memory for its weights; the names are those of the hub's index, one tensor for each expert."""
    import transformers

    config = MODELS[name].config
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(config))
    family = family_of(config)
    state = {key: tensor for key, tensor in model.state_dict().items() if "inv_freq" not in key}
    source = checked_source(InMemory(state), family, config)
    assert source.names() == {name for rule in family.weight_rules(config) for name in rule.hf_names}
    named = {tensor.name: tensor.shape for tensor in disk_tensors(family, config)}
    last = f"model.layers.{int(config['num_hidden_layers']) - 1}.mlp.experts"
    if family.is_fused_on_disk:
        assert named == {key: tuple(tensor.shape) for key, tensor in state.items()}
    else:
        experts = int(config.get("num_experts") or config["n_routed_experts"])
        assert f"{last}.{experts - 1}.down_proj.weight" in named
    assert sum(tensor.numel() for tensor in state.values()) == sum(math.prod(shape) for shape in named.values())
