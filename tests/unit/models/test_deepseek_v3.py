"""DeepSeek-V3's config.json: rotation old and new, scales of YaRN, what is left out, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

from moerl.errors import CheckpointError
from moerl.models.family import family_of
from moerl.models.hf_folder import InMemory, checked_source

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 20,
    "intermediate_size": 28,
    "kv_lora_rank": 8,
    "max_position_embeddings": 2560,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 2,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 6,
    "vocab_size": 37,
}


def settings(**changes):
    hf = {**CONFIG, **changes}
    return family_of(hf).transformer_kwargs(hf)


@pytest.mark.parametrize("scaling", [None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 1e4}])
def test_a_plain_rotation_is_not_stretched(scaling):
    """Megatron-Bridge 2791: left unset, megatron stretches by 40."""
    found = settings(rope_scaling=scaling)
    assert (found["rope_type"], found["rotary_scaling_factor"], found["mscale_all_dim"]) == ("rope", 1.0, 0.0)
    assert found["rotary_base"] == 1e4


def test_old_and_new_place_are_the_same():
    """ROLL 473."""
    new = {"rope_type": "yarn", **{k: v for k, v in YARN.items() if k != "type"}, "rope_theta": 10000}
    old, moved = settings(rope_scaling=YARN), settings(rope_theta=None, rope_parameters=new)
    assert old == moved
    assert (old["beta_fast"], old["beta_slow"]) == (32.0, 1.0)
    assert settings(rope_scaling={**YARN, "beta_fast": 1.0, "beta_slow": 2})["beta_fast"] == 1.0


@pytest.mark.parametrize("mscale", [None, 0, 0.707, 1.0, 1.3])
@pytest.mark.parametrize("everywhere", [None, 0, 0.707, 1.0])
@pytest.mark.parametrize("factor", [1, 4, 40])
def test_scales_of_yarn_are_those_of_transformers(mscale, everywhere, factor):
    """transformers' factor on cosines and sines, and on the softmax scale, out of megatron's formulas."""
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    scaling = {**YARN, "factor": factor, "mscale": mscale, "mscale_all_dim": everywhere}
    found = settings(rope_scaling=scaling)
    config = DeepseekV3Config(rope_parameters={**scaling, "rope_type": "yarn", "rope_theta": 1e4}, qk_rope_head_dim=4)

    def m(scale: float) -> float:
        return 0.1 * scale * float(torch.tensor(float(factor)).double().log()) + 1 if factor > 1 else 1.0

    _, concentration = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert m(found["mscale"]) / m(found["mscale_all_dim"]) == pytest.approx(concentration, rel=1e-12)
    rope = config.rope_parameters
    assert m(found["mscale_all_dim"]) ** 2 == pytest.approx(
        yarn_apply_mscale({**rope, "mscale_all_dim": rope["mscale_all_dim"] or 0}, 1.0), rel=1e-12
    )


def test_layers_of_multi_token_prediction_are_known_as_many_as_there_are():
    """Megatron-Bridge 4960 and slime 2131: none missing without a word, and more than one of them."""
    family = family_of(CONFIG)
    rules = family.weight_rules(CONFIG)
    tensors = {n: torch.zeros(s) for rule in rules for n, s in zip(rule.hf_names, rule.hf_shapes, strict=True)}
    extra = [f"model.layers.{layer}.{name}" for layer in (2, 3) for name in ("eh_proj.weight", "mlp.gate.weight")]
    checked_source(InMemory(tensors | dict.fromkeys(extra, torch.zeros(2, 2))), family, CONFIG)
    beyond = {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match=r"unmapped tensors: model\.layers\.4\.eh_proj\.weight"):
        checked_source(InMemory(tensors | beyond), family, CONFIG)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, which is not supported (allowed: None, 4)"),
        ({"head_dim": 14}, "head_dim is 14"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3; rotation takes pairs"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False with num_experts_per_tok 3"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"n_group": 3}, "groups must be equal, and the token must take 2 experts for each group"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_scaling": {**YARN, "rope_theta": 5e4}}, "rope_theta of the rotary embedding is 10000 in one place"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rotary embedding of type 'linear'"),
        ({"rope_scaling": {"type": "default", "factor": 2}}, "of type 'default' with factor"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.1}}, "attention_factor is 1.1"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate is False"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor of the rotary embedding is 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "original_max_position_embeddings is missing"),
        ({"something_new": 3}, "something_new=3 may change what the model computes"),
    ],
)
def test_what_is_not_known_is_refused(changes, told):
    with pytest.raises(CheckpointError, match=re.escape(told)):
        settings(**changes)


def test_a_latent_of_queries_is_never_guessed():
    hf = {name: value for name, value in CONFIG.items() if name != "q_lora_rank"}
    with pytest.raises(CheckpointError, match="q_lora_rank is missing"):
        family_of(hf).transformer_kwargs(hf)
