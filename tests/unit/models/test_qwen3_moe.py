from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moerl.errors import CheckpointError, ConfigError
from moerl.models.family import family_of
from moerl.models.hf_folder import InMemory, Unfused, check_names, checked_source

RELEASED = {  # Qwen3-30B-A3B, as its config.json has it
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def with_fields(**changes):
    hf = copy.deepcopy(RELEASED)
    for name, value in changes.items():
        if value is ...:
            del hf[name]
        else:
            hf[name] = value
    return hf


def settings(**changes):
    hf = with_fields(**changes)
    return family_of(hf).transformer_kwargs(hf)


def test_the_released_config():
    family = family_of(RELEASED)
    values = family.transformer_kwargs(RELEASED)
    assert values["kv_channels"] == 128  # not 2048 / 32
    assert values["moe_layer_freq"] == [1] * 48
    assert values["moe_router_pre_softmax"] is False
    assert values["rotary_base"] == 1e6
    assert values["num_query_groups"] == 4
    rules = family.weight_rules(RELEASED)
    per_layer = 1 + 1 + 2 + 1 + 1 + 1 + 128 * 2
    assert len(rules) == 3 + 48 * per_layer
    elements = sum(torch.Size(shape).numel() for rule in rules for shape in rule.hf_shapes)
    assert elements == 30_532_122_624  # the published 30.5 B
    expert = next(rule for rule in rules if rule.expert == 7 and rule.layer == 3)
    assert expert.is_expert
    assert expert.megatron_name == "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight"
    assert expert.hf_names == tuple(f"model.layers.3.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up"))
    assert expert.shard_shape(2) == (768, 2048)


def test_what_qwen3_coder_names_is_what_the_others_have():
    coder = {"attention_bias": ..., "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert settings(**coder) == settings()


def test_what_other_tools_write_is_let_through():
    """Unsloth's marks, transformers' own, and what an old dump said of sampling."""
    written = {
        "_attn_implementation_autoset": True,
        "auto_map": {"AutoModelForCausalLM": "modeling_x.X"},
        "do_sample": True,
        "max_length": 20,
        "num_beams": 1,
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "tokenizer_class": "Qwen2Tokenizer",
        "top_k": 50,
        "top_p": 0.8,
        "unsloth_fixed": True,
        "unsloth_version": "2025.3.18",
    }
    assert settings(**written) == settings()


def test_new_spellings_of_transformers_5_mean_the_same():
    new = with_fields(
        num_experts=...,
        num_local_experts=128,
        rope_theta=...,
        rope_scaling=...,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
        torch_dtype=...,
        dtype="bfloat16",
    )
    assert family_of(new).transformer_kwargs(new) == settings()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"mlp_only_layers": [0, 4]}, [0, 1, 1, 1, 0, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1, 0, 1]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, [0, 0, 1, 0, 0, 0]),
    ],
)
def test_dense_and_moe_layers(changes, expected):
    assert settings(num_hidden_layers=6, **changes)["moe_layer_freq"] == expected


def test_router_follows_norm_topk_prob():
    assert settings(norm_topk_prob=True)["moe_router_pre_softmax"] is False
    assert settings(norm_topk_prob=False)["moe_router_pre_softmax"] is True


def test_a_missing_head_dim_is_hidden_over_heads():
    assert settings(head_dim=...)["kv_channels"] == 64
    assert settings(head_dim=None)["kv_channels"] == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True, which is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'.*allowed: 'silu'"),
        ({"hidden_act": ...}, r"hidden_act is missing; defaults are never guessed \(allowed: .silu.\)"),
        ({"is_causal": False}, r"is_causal is False, which is not supported \(allowed: True\)"),
        ({"is_causal": None}, "is_causal is None"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types has \['sliding_attention'\]"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling has type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}}, "rope_parameters has type 'linear'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope_scaling has factor, which unscaled rope"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "contradict each other"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_local_experts": 64}, "num_experts': 128.*num_local_experts': 64.* contradict"),
        ({"num_experts": ...}, "num_experts or num_local_experts is missing"),
        ({"norm_topk_prob": ...}, "norm_topk_prob is missing; defaults are never guessed"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; a value of type bool is needed"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'; a value of type int"),
        ({"hidden_size": True}, "hidden_size is True; a value of type int"),
        ({"rms_norm_eps": ...}, "rms_norm_eps is missing"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok 200 exceeds num_experts 128"),
        ({"mlp_only_layers": [48]}, r"mlp_only_layers names \[48\], but there are only 48 layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be at least 1"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is 512.*allowed: None, 0"),
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"use_qk_norm": False}, "use_qk_norm is False.*allowed: None, True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        settings(**changes)


def test_unknown_fields_that_are_off_are_let_through():
    assert settings(new_feature=False, other=None, more=[], is_causal=True) == settings()


def test_unknown_architectures_and_families():
    with pytest.raises(
        CheckpointError, match=r"\['GemmaForCausalLM'\], which no model family supports \(supported:.*Qwen3"
    ):
        family_of({"architectures": ["GemmaForCausalLM"]})
    with pytest.raises(CheckpointError, match=r"architectures is \[\]"):
        family_of({})
    with pytest.raises(ConfigError, match="did you mean 'qwen3_moe'"):
        family_of(RELEASED, "qwen3moe")
    assert type(family_of({}, "qwen3_moe")) is type(family_of(RELEASED))


def small_model(**changes):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=11,
        hidden_size=3,
        intermediate_size=7,
        moe_intermediate_size=5,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=2,
        num_experts_per_tok=1,
        norm_topk_prob=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **changes}))
    model.set_experts_implementation("eager")  # the grouped product refuses widths this odd
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    hf = {**model.config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}
    return model, hf


def test_megatron_experts_compute_what_transformers_computes():
    """Per-expert products: a layout that only has the right shapes gives other numbers."""
    model, hf = small_model()
    family = family_of(hf)
    source = checked_source(InMemory(model.state_dict()), family, hf)
    made = {r.megatron_name: r.to_megatron({n: source.get(n) for n in r.hf_names}) for r in family.weight_rules(hf)}
    x = torch.randn(1, 6, 3)
    block: Any = model.model.layers[0].mlp
    with torch.no_grad():
        output = block(x)
        expected = (output[0] if isinstance(output, tuple) else output).reshape(6, 3)
    weights, chosen = (x.reshape(6, 3) @ made["decoder.layers.0.mlp.router.weight"].T).softmax(-1).max(-1)
    computed = torch.empty(6, 3)
    for token in range(6):
        at = f"decoder.layers.0.mlp.experts.local_experts.{int(chosen[token])}"
        gate, up = (made[f"{at}.linear_fc1.weight"] @ x[0, token]).chunk(2)
        computed[token] = weights[token] * (made[f"{at}.linear_fc2.weight"] @ (F.silu(gate) * up))
    assert chosen.unique().numel() == 2
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)


def test_dropped_experts_are_an_error():
    model, hf = small_model()
    family = family_of(hf)
    state = {name: value for name, value in model.state_dict().items() if ".experts." not in name}
    message = (
        r"unfilled parameters: decoder\.layers\.0\.mlp\.experts\.local_experts\.0\.linear_fc1\.weight \(needs model"
    )
    with pytest.raises(CheckpointError, match=message):
        checked_source(InMemory(state), family, hf)


def test_left_over_tensors_are_an_error_and_known_ones_are_not():
    model, hf = small_model()
    family = family_of(hf)
    state = {**model.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    checked_source(InMemory(state), family, hf)
    state["model.layers.1.input_layernorm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"unmapped tensors: model\.layers\.1\.input_layernorm\.weight; "):
        checked_source(InMemory(state), family, hf)


def test_a_tied_head_may_be_there_or_not():
    model, hf = small_model(tie_word_embeddings=True)
    family = family_of(hf)
    with_head = model.state_dict()
    assert "lm_head.weight" in with_head
    without = {name: value for name, value in with_head.items() if name != "lm_head.weight"}
    for state in (with_head, without):
        source = checked_source(InMemory(state), family, hf)
        check_names(source, family.weight_rules(hf), ("lm_head.weight",))
    assert "output_layer.weight" not in {rule.megatron_name for rule in family.weight_rules(hf)}


def test_fused_tensors_of_another_size_are_refused():
    model, hf = small_model()
    family = family_of(hf)
    slices = family.fused_slices({**hf, "num_experts": 3, "num_local_experts": 3})
    with pytest.raises(
        CheckpointError, match=r"experts\.gate_up_proj' has shape \[2, 10, 3\] where .* implies \[3, 10"
    ):
        Unfused(InMemory(model.state_dict()), slices)
