"""Rotary embeddings of Llama: the old and the new place of the scaling, and what Megatron has no place for."""

from __future__ import annotations

import pytest

from moerl.errors import CheckpointError
from moerl.models.family import family_of

SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
RELEASED = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
"""Of Llama 3.1 8B."""


def settings(**changes):
    hf = {name: value for name, value in {**RELEASED, **changes}.items() if value is not ...}
    return family_of(hf).transformer_kwargs(hf)


def rope(values):
    return [values.get(name) for name in ("rotary_base", "rope_scaling", "rope_scaling_factor")]


def test_the_released_config():
    values = settings()
    assert rope(values) == [5e5, True, 8.0]
    assert values["kv_channels"] == 128
    assert values["moe_layer_freq"] == [0] * 32
    assert not [name for name in values if name.startswith("moe_") and name != "moe_layer_freq"]
    assert "num_moe_experts" not in values


LLAMA_2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}


def test_llama_2_was_written_before_the_field_of_its_base():
    """What transformers takes for it is what it then was."""
    from transformers import LlamaConfig

    found = family_of(LLAMA_2).transformer_kwargs(LLAMA_2)
    assert found["rotary_base"] == LlamaConfig.from_dict(dict(LLAMA_2)).rope_parameters["rope_theta"] == 10000.0
    said = {**LLAMA_2, "rope_theta": 5e5}
    assert family_of(said).transformer_kwargs(said)["rotary_base"] == 5e5


@pytest.mark.parametrize(
    "changes",
    [
        {"transformers_version": "4.32.0"},
        {"transformers_version": "5.24.0"},
        {"transformers_version": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default"}},
    ],
)
def test_a_base_is_guessed_of_no_newer_or_stretched_llama(changes):
    hf = {**LLAMA_2, **changes}
    with pytest.raises(CheckpointError, match=r"rope_theta is missing|'linear'"):
        family_of(hf).transformer_kwargs(hf)


def test_both_places_mean_the_same():
    new = {**SCALING, "rope_theta": 5e5}
    assert settings(rope_scaling=..., rope_theta=..., rope_parameters=new) == settings()
    assert rope(settings(rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})) == [
        5e5,
        None,
        None,
    ]
    assert rope(settings(rope_scaling=None)) == [5e5, None, None]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": {**SCALING, "low_freq_factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {**SCALING, "original_max_position_embeddings": 4096}}, "built for"),
        ({"rope_scaling": {n: v for n, v in SCALING.items() if n != "high_freq_factor"}}, "high_freq_factor"),
        ({"rope_scaling": {**SCALING, "factor": None}}, "factor is missing"),
        ({"rope_scaling": {**SCALING, "factor": 0.5}}, "at least 1"),
        ({"rope_scaling": {**SCALING, "mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {**SCALING, "factor": 32.0}}, "contradict"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "contradict"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 4096}, "sliding_window"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(changes, told):
    with pytest.raises(CheckpointError, match=told):
        settings(**changes)
