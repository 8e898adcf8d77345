"""A value of config.json that is of a wrong type or size is an error that names it, never a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from small_configs import SMALL, small_config

from moerl.errors import CheckpointError, ConfigError, DataError
from moerl.models.family import families, family_of
from moerl.models.quantised import Dequantised

ODD: tuple[Any, ...] = ("x", None, 0, -1, [], True, 1.5, 5, {}, {"x": 5}, [[]], ["x"], [5], "1")
"""What a field may be by mistake."""


def read(hf: dict[str, Any]) -> None:
    """All that a family reads of config.json."""
    family = family_of(hf)
    family.transformer_kwargs(hf)
    family.weight_rules(hf)
    family.fused_slices(hf)
    family.repeated_names(hf)
    family.carried_names(hf)


def damaged(hf: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(field, value, config.json with it), for every field, and every one inside those that are JSON objects."""
    for field, old in hf.items():
        for value in ODD:
            yield field, value, {**hf, field: value}
            for inner in old if isinstance(old, dict) else ():
                yield f"{field}.{inner}", value, {**hf, field: {**old, inner: value}}


def test_every_family_is_here():
    assert set(SMALL) == set(families.names())


@pytest.mark.parametrize("family", SMALL)
def test_any_value_of_any_field_is_read_or_refused(family):
    read(small_config(family))
    refused = 0
    for field, value, hf in damaged(small_config(family)):
        try:
            read(hf)
        except (CheckpointError, ConfigError, DataError):
            refused += 1
        except Exception as error:  # noqa: BLE001  the finding itself
            pytest.fail(f"{field}={value!r}: {type(error).__name__}: {error}")
    assert refused > 100


SIZES = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("field", [*SIZES, "num_key_value_heads", "vocab_size"])
def test_a_size_is_a_whole_number_from_one(family, field):
    for value in ("x", 0, -1, []):
        with pytest.raises(CheckpointError) as caught:
            read(small_config(family, **{field: value}))
        assert f"{field} is {value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("qwen3", {"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; a JSON object is needed, or null"),
        ("deepseek_v3", {"rope_scaling": ["yarn"]}, "rope_scaling is ['yarn']; a JSON object is needed"),
        ("llama", {"rope_parameters": 5}, "rope_parameters is 5; a JSON object is needed"),
        ("mixtral", {"rope_theta": "1e6"}, "rope_theta is '1e6'; a value of type float is needed"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": "1"}},
            "mscale is '1'; a value of type float is needed",
        ),
        ("deepseek_v3", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1'; a value of type int is"),
        ("glm4_moe", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1; it must be at least 0"),
        ("minimax_m2", {"num_mtp_modules": "3"}, "num_mtp_modules is '3'; a value of type int is needed"),
        ("minimax_m2", {"attn_type_list": 1}, "attn_type_list is 1; a list of values of type int is needed"),
        ("qwen3_moe", {"mlp_only_layers": 5}, "mlp_only_layers is 5; a list of values of type int is needed"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers is ['0']; a list of values of type int is needed"),
        ("qwen2_moe", {"layer_types": "full_attention"}, "layer_types is 'full_attention'; a list of values of type"),
        (
            "gpt_oss",
            {"layer_types": [["full_attention"]] * 2},
            "layer_types is [['full_attention'], ['full",
        ),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts is 0; it must be at least 1"),
        ("qwen3_moe", {"head_dim": None, "num_attention_heads": 20}, "head_dim is 0; it must be at least 1"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be at least 1"),
        ("qwen3", {"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM'; a list of names is"),
        (
            "qwen3",
            {"architectures": [["Qwen3ForCausalLM"]]},
            "architectures is [['Qwen3ForCausalLM']]; a list of",
        ),
    ],
)
def test_it_is_named_with_what_is_allowed(family, changes, told):
    with pytest.raises(CheckpointError, match=re.escape(told)):
        read(small_config(family, **changes))


class _Nothing:
    def names(self) -> frozenset[str]:
        return frozenset()


@pytest.mark.parametrize("groups", ["x", ["x"], {"group_0": 5}, {"group_0": {"weights": "x"}}])
def test_groups_of_quantised_weights_are_objects(groups):
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(CheckpointError, match=r"config_groups .*; a JSON object is needed"):
        Dequantised(_Nothing(), settings)  # pyright: ignore[reportArgumentType] it is not read
