"""Which models SGLang 0.5.23 computes otherwise than their config.json says.

Its code for a family writes down what published models of it have in common. It loads a model of another kind without a
word (parameters that it makes up and does not find stay as they were made) and answers for another policy. Held against
transformers on a server: a tied head is 2.0 off in log-probability, a layer without experts 0.25, another epsilon 8e-4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moerl.errors import ConfigError

FP32_ROUNDING = 5e-5
"""How far its logprobs in fp32 may be off: its attention is float32 throughout, and where the trainer's and the
built-in sampler's was too, they were up to 2.3e-5 apart. Of the servers of the tests, T = 0.7, 7.0e-6 was seen."""
UNTIED = {"tie_word_embeddings": False}
SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}
SERVED_AS: dict[str, dict[str, Any]] = {
    "qwen3_moe": UNTIED | SPARSE,
    "qwen2_moe": UNTIED | SPARSE,
    "glm4_moe": UNTIED,
    "minimax_m2": UNTIED,
    "mixtral": UNTIED,
    "olmoe": UNTIED | {"rms_norm_eps": 1e-5, "norm_topk_prob": False},
}
"""Family -> field -> the value that its code has for it, which is also what a missing field means."""
DERIVED_HEADS = ("mixtral", "olmoe", "qwen2_moe")
"""Families whose head size it takes as hidden_size / num_attention_heads."""


def refuse_other_arithmetic(folder: Path, tensor: int = 1) -> None:
    """Refuse the model of `folder` where a server would compute another one; one without a readable config.json passes.

    Args:
        folder: Hugging Face folder.
        tensor: processes that share a layer, where that is known.

    Raises:
        ConfigError: names every field, what the model has and what SGLang computes with.
    """
    path = folder / "config.json"
    try:
        model = json.loads(path.read_text())
    except (OSError, ValueError):  # whoever builds the model says so
        return
    faults = [f"{path}: {fault}" for fault in _faults(model, tensor)]
    if faults:
        raise ConfigError(*(f"{fault}; sample with rollout.engine=local" for fault in faults))


def _faults(model: Mapping[str, Any], tensor: int) -> Iterator[str]:
    family = model.get("model_type", "")
    for field, fixed in SERVED_AS.get(family, {}).items():
        value = model.get(field)
        if value is not None and value != fixed:
            yield f"{field} is {value}, but SGLang serves {family} as if it were {fixed}"
    heads = model.get("num_attention_heads") or 1
    derived = (model.get("hidden_size") or 0) // heads
    if family in DERIVED_HEADS and model.get("head_dim") not in (None, derived):
        yield f"head_dim is {model['head_dim']}, but SGLang serves {family} with heads of {derived}"
    rope = model.get("rope_parameters") or {}
    share = model.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    if family == "minimax_m2" and model.get("rotary_dim") is None and share != 1.0:
        yield f"partial_rotary_factor is {share}, but SGLang reads rotary_dim alone; set that"
    if family == "olmoe":
        if (model.get("num_key_value_heads") or heads) != heads:
            yield (
                f"num_key_value_heads is {model['num_key_value_heads']}, but SGLang serves olmoe with as many as "
                f"num_attention_heads, {heads}"
            )
        if tensor > 1:
            yield (
                "SGLang normalises queries and keys of olmoe over all heads, which none of "
                f"{tensor} processes has: set rollout.engine.servers.tensor to 1"
            )
