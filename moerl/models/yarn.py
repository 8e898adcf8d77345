"""YaRN (arXiv 2309.00071) over whole heads, as transformers computes it, in Megatron's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import HFConfig
from moerl.models.hf_config import (
    PLAIN_ROPE_FIELDS,
    YARN_FIELDS,
    optional,
    plain_rope_theta,
    positive,
    refuse_active,
    required,
    rope_tables,
    rope_values,
)

_SAME = 1e-6
"""Relative difference below which two factors of attention are one, written with fewer digits."""


def yarn_or_plain_rope(hf: HFConfig) -> dict[str, Any]:
    """Megatron settings of a rotation over whole heads, from the old place or the new one: as it is, or by YaRN.

    Raises:
        CheckpointError: as `yarn_rope` or `plain_rope_theta`.
    """
    if any(table.get("rope_type", table.get("type")) == "yarn" for table in rope_tables(hf).values()):
        return yarn_rope(hf)
    return {"rotary_base": plain_rope_theta(hf), "rotary_percent": 1.0}


def yarn_rope(hf: HFConfig) -> dict[str, Any]:
    """Megatron settings of YaRN, from the old place or the new one.

    Raises:
        CheckpointError: another kind of scaling, an unknown or missing field, one written twice with two values, or a
            factor of attention that transformers and engines read differently.
    """
    values = rope_values(hf)
    unknown = sorted(values.keys() - PLAIN_ROPE_FIELDS - YARN_FIELDS - {"attn_factor"})
    if values.get("rope_type") != "yarn" or unknown:
        raise CheckpointError(
            f"config.json: rotary embedding of type {values.get('rope_type')!r} with {', '.join(unknown) or 'nothing'} "
            "beyond the known fields is not supported (allowed: 'yarn' with its own fields)"
        )
    for name in ("mscale", "mscale_all_dim"):
        refuse_active(values, name, (None,))
    refuse_active(values, "partial_rotary_factor", (None, 1, 1.0))
    factor = required(values, float, "factor")
    if factor < 1:
        raise CheckpointError(f"config.json: factor of the rotary embedding is {factor}; it must be at least 1")
    return {
        "position_embedding_type": "yarn",
        "rotary_base": required(values, float, "rope_theta"),
        "rotary_percent": 1.0,
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": positive(values, "original_max_position_embeddings"),
        "yarn_beta_fast": optional(values, float, "beta_fast", 0.0) or 32.0,  # absent or 0: transformers' own defaults
        "yarn_beta_slow": optional(values, float, "beta_slow", 0.0) or 1.0,
        **_mscales(values, factor),
        "yarn_correction_range_round_to_int": optional(values, bool, "truncate", True),
    }


def _mscales(values: Mapping[str, Any], factor: float) -> dict[str, float | None]:
    """What makes Megatron multiply cosines and sines by the factor of attention; by default m = 0.1 ln(factor) + 1.

    transformers multiplies by `attention_factor`, or m where it is absent, and knows no `attn_factor`; SGLang and vLLM
    multiply by m times `attn_factor`, or m, and know no `attention_factor`. So what only one of them reads is refused.
    Megatron multiplies by (0.1 ln(factor) mscale + 1) / (0.1 ln(factor) mscale_all_dim + 1), where both are there.
    """
    slope = 0.1 * math.log(factor)
    usual = slope + 1
    wanted = required({"attention_factor": usual, **_given(values, "attention_factor")}, float, "attention_factor")
    of_engines = usual * required({"attn_factor": 1.0, **_given(values, "attn_factor")}, float, "attn_factor")
    if not math.isclose(wanted, of_engines, rel_tol=_SAME):
        said = ", ".join(f"{name} {value!r}" for name in _FACTORS for value in _given(values, name).values())
        raise CheckpointError(
            f"config.json: the rotary embedding has {said}, by which transformers multiplies cosines and sines by "
            f"{wanted:.6g} (it reads attention_factor alone) and SGLang by {of_engines:.6g} (it reads attn_factor "
            f"alone); for the second write attention_factor: {of_engines!r} beside attn_factor: "
            f"{of_engines / usual!r}, for the first attn_factor: {wanted / usual!r} beside attention_factor: {wanted!r}"
        )
    if factor == 1 and wanted != 1:
        raise CheckpointError(
            f"config.json: the rotary embedding has factor 1, which stretches nothing, and attention_factor "
            f"{wanted!r}, for which Megatron then has no place; set attention_factor to 1.0"
        )
    if math.isclose(wanted, usual, rel_tol=_SAME):
        return {"yarn_mscale": None, "yarn_mscale_all_dim": None}
    return {"yarn_mscale": (wanted - 1) / slope, "yarn_mscale_all_dim": 0.0}


_FACTORS = ("attention_factor", "attn_factor")


def _given(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: values[name]} if values.get(name) is not None else {}
