"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its sizes, rules and settings.

Queries and keys-and-values pass through narrow latents; of each head a part of its own is not rotated, and one rotated
key is shared by all heads. Pairs of neighbouring rows are rotated in both worlds, so no row moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import HFConfig
from moerl.models.hf_config import (
    PLAIN_ROPE_FIELDS,
    YARN_FIELDS,
    optional,
    positive,
    refuse_active,
    required,
    rope_values,
)
from moerl.models.rules import Copy, Rule

LATENT_FIELDS = frozenset(
    {
        "attention_bias",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_interleave",
        "v_head_dim",
    }
)
"""Of config.json, read or checked here."""

LATENT_HARMLESS = frozenset({"aux_loss_alpha", "ep_size", "moe_layer_freq", "pretraining_tp", "seq_aux"})
"""Of released files: code to load, the balance of pretraining, other trainers' layouts; `moe_layer_freq` is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Widths, checked."""

    query_rank: int | None
    """Of the queries' latent; None where queries come from the hidden state itself."""
    rank: int
    """Of the latent of keys and values."""
    plain: int
    """Part of a head's query and key that is not rotated."""
    rotated: int
    value: int

    @property
    def head_dim(self) -> int:
        """Of a query or key."""
        return self.plain + self.rotated


def read_latent(hf: HFConfig) -> LatentAttention:
    """From config.json.

    Raises:
        CheckpointError: a field is missing, contradicts another, or has a value that is not supported.
    """
    refuse_active(hf, "attention_bias")
    refuse_active(hf, "rope_interleave", (None, True))
    heads = positive(hf, "num_attention_heads")
    refuse_active(hf, "num_key_value_heads", (None, heads))
    rotated, plain = positive(hf, "qk_rope_head_dim"), positive(hf, "qk_nope_head_dim")
    refuse_active(hf, "head_dim", (None, rotated))
    refuse_active(hf, "qk_head_dim", (None, plain + rotated))
    if rotated % 2:
        raise CheckpointError(f"config.json: qk_rope_head_dim is {rotated}; rotation takes pairs, so it must be even")
    if "q_lora_rank" not in hf:
        raise CheckpointError("config.json: field q_lora_rank is missing; add it (null for queries without a latent)")
    return LatentAttention(
        query_rank=None if hf["q_lora_rank"] is None else positive(hf, "q_lora_rank"),
        rank=positive(hf, "kv_lora_rank"),
        plain=plain,
        rotated=rotated,
        value=positive(hf, "v_head_dim"),
    )


def latent_kwargs(latent: LatentAttention, hf: HFConfig) -> dict[str, Any]:
    """Megatron settings, those of the rotation included."""
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotated,
        "v_head_dim": latent.value,
        **latent_rope(hf),
    }


def latent_rope(hf: HFConfig) -> dict[str, Any]:
    """Megatron settings of the rotation, plain or YaRN (arXiv 2309.00071), from the old place or the new one.

    Megatron's own defaults stretch by 40, so a plain rotation is written out too.

    Raises:
        CheckpointError: another kind of scaling, a missing field, one written twice with two values, or unknown ones.
    """
    values = rope_values(hf)
    base = required(values, float, "rope_theta")
    kind = values.get("rope_type", "default")
    unknown = values.keys() - PLAIN_ROPE_FIELDS - (YARN_FIELDS if kind == "yarn" else frozenset())
    if kind not in ("default", "yarn") or unknown:
        raise CheckpointError(
            f"config.json: rotary embedding of type {kind!r} with {', '.join(sorted(unknown)) or 'no more fields'} is "
            "not supported with latent attention (allowed: 'default', or 'yarn' with its own fields)"
        )
    refuse_active(values, "partial_rotary_factor", (None, 1, 1.0))
    settings = {"rotary_base": base, "rotary_percent": 1.0}
    if kind == "default":
        return settings | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    refuse_active(values, "attention_factor", (None,))
    refuse_active(values, "truncate", (None, True))
    factor = required(values, float, "factor")
    if factor < 1:
        raise CheckpointError(f"config.json: factor of the rotary embedding is {factor}; it must be at least 1")
    mscale, mscale_all_dim = _mscales(values, factor)
    return settings | {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": positive(values, "original_max_position_embeddings"),
        "beta_fast": optional(values, float, "beta_fast", 0.0) or 32.0,  # absent or 0: transformers' own defaults
        "beta_slow": optional(values, float, "beta_slow", 0.0) or 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def _mscales(values: dict[str, Any], factor: float) -> tuple[float, float]:
    """(mscale, mscale_all_dim) such that Megatron scales as transformers does.

    With m(x) = 0.1 x ln(factor) + 1 both multiply the softmax scale by m(mscale_all_dim)^2. Cosines and sines are
    multiplied by m(mscale) / m(mscale_all_dim) in Megatron always, in transformers where neither is 0 or absent; else
    by m(1).
    """
    mscale, everywhere = (optional(values, float, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if factor == 1 or (mscale and everywhere):
        return mscale or 1.0, everywhere
    slope = 0.1 * math.log(factor)
    return ((slope + 1) * (slope * everywhere + 1) - 1) / slope if everywhere else 1.0, everywhere


def latent_rules(latent: LatentAttention, hidden: int, heads: int, layer: int) -> Iterator[Rule]:
    """Of one layer's attention, its output projection included; all are copies.

    The projections to latents are cut by rows too: Megatron gathers what comes out of them.
    """
    hf, megatron = f"model.layers.{layer}.self_attn", f"decoder.layers.{layer}.self_attention"
    query, down, up = heads * latent.head_dim, latent.rank + latent.rotated, heads * (latent.plain + latent.value)
    rows: list[tuple[str, str, tuple[int, ...], int | None]] = []
    if latent.query_rank is None:
        rows.append(("linear_q_proj", "q_proj", (query, hidden), 0))
    else:
        rows.append(("linear_q_down_proj", "q_a_proj", (latent.query_rank, hidden), 0))
        rows.append(("q_layernorm", "q_a_layernorm", (latent.query_rank,), None))
        rows.append(("linear_q_up_proj", "q_b_proj", (query, latent.query_rank), 0))
    rows.append(("linear_kv_down_proj", "kv_a_proj_with_mqa", (down, hidden), 0))
    rows.append(("kv_layernorm", "kv_a_layernorm", (latent.rank,), None))
    rows.append(("linear_kv_up_proj", "kv_b_proj", (up, latent.rank), 0))
    rows.append(("linear_proj", "o_proj", (hidden, heads * latent.value), 1))
    for name, part, shape, axis in rows:
        yield Copy(
            megatron_name=f"{megatron}.{name}.weight",
            hf_names=(f"{hf}.{part}.weight",),
            hf_shapes=(shape,),
            tensor_axis=axis,
            layer=layer,
        )
