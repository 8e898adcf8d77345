"""YaRN of published configurations, and factors of attention that readers would take for different models."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from moerl.errors import CheckpointError, ConfigError
from moerl.models.family import family_of
from moerl.reference.config import ReferenceConfig

R1_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attn_factor": 0.8782488562869419,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_type": "yarn",
    },
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Of DeepSeek-R1-0528-Qwen3-8B."""
LONG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""What the pages of Qwen3 say to write for long contexts."""
USUAL = 0.1 * math.log(4) + 1


def settings(**rope):
    hf = {**R1_QWEN3, "rope_scaling": {**LONG, **rope}}
    return family_of(hf).transformer_kwargs(hf)


def scale_of(values):
    """By what Megatron multiplies cosines and sines, by its own formula."""
    if values["yarn_mscale"] is None:
        return USUAL
    m, everywhere = (0.1 * values[name] * math.log(4) + 1 for name in ("yarn_mscale", "yarn_mscale_all_dim"))
    return m / everywhere


def test_what_qwens_pages_say_for_long_contexts():
    values = settings()
    assert values["position_embedding_type"] == "yarn"
    assert (values["yarn_rotary_scaling_factor"], values["yarn_original_max_position_embeddings"]) == (4.0, 32768)
    assert (values["rotary_base"], values["yarn_beta_fast"], values["yarn_beta_slow"]) == (1e6, 32.0, 1.0)
    assert values["yarn_correction_range_round_to_int"] is True
    assert scale_of(values) == USUAL
    new = {**R1_QWEN3, "rope_scaling": None, "rope_theta": None, "rope_parameters": {**LONG, "rope_theta": 1e6}}
    assert family_of(new).transformer_kwargs(new) == values


@pytest.mark.parametrize("factor", [1.0, 1.2, USUAL])
def test_a_factor_that_all_readers_have_is_megatrons(factor):
    values = settings(attention_factor=factor, attn_factor=factor / USUAL)
    assert scale_of(values) == pytest.approx(factor, rel=1e-12)
    assert ReferenceConfig.from_dict({**R1_QWEN3, "rope_scaling": {**LONG, "attention_factor": USUAL}})


@pytest.mark.parametrize(
    ("rope", "theirs", "engines"),
    [
        (R1_QWEN3["rope_scaling"], USUAL, 1.0),
        ({**LONG, "attention_factor": 1.0}, 1.0, USUAL),
        ({**LONG, "attention_factor": 1.0, "attn_factor": 1.0}, 1.0, USUAL),
    ],
)
def test_a_factor_that_readers_take_differently_is_refused_and_either_way_out_is_taken(rope, theirs, engines):
    """transformers' own factor is asked; both remedies of the message lead to what it names."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = {**R1_QWEN3, "rope_scaling": rope}
    read = Qwen3Config.from_dict(json.loads(json.dumps(hf)))
    assert ROPE_INIT_FUNCTIONS["yarn"](read, torch.device("cpu"))[1] == pytest.approx(theirs)
    with pytest.raises(CheckpointError, match=r"transformers multiplies cosines and sines by .* SGLang by") as caught:
        family_of(hf).transformer_kwargs(hf)
    with pytest.raises(ConfigError, match="factors of attention that contradict each other"):
        ReferenceConfig.from_dict(hf)
    ways = re.findall(r"(\w+): ([\d.]+) beside (\w+): ([\d.]+)", str(caught.value))
    assert len(ways) == 2
    for way, wanted in zip(ways, (engines, theirs), strict=True):
        fields = {way[0]: float(way[1]), way[2]: float(way[3])}
        assert scale_of(settings(**fields)) == pytest.approx(wanted, rel=1e-6)
        config = ReferenceConfig.from_dict({**R1_QWEN3, "rope_scaling": {**LONG, **fields}})
        assert config.rope_scaling.attention_factor == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"factor": None}, "factor is missing"),
        ({"factor": 0.5}, "must be at least 1"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
        ({"mscale": 1.0}, "mscale is 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"new_field": 1}, "type 'yarn' with new_field beyond the known fields"),
        ({"factor": 1.0, "attention_factor": 1.2, "attn_factor": 1.2}, "stretches nothing"),
        ({"rope_theta": 5.0}, "in one place and"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(rope, told):
    with pytest.raises(CheckpointError, match=re.escape(told)):
        settings(**rope)
