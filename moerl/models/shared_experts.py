"""What families with shared experts after dense first layers say alike (DeepSeekMoE, arXiv 2401.06066)."""

from __future__ import annotations

from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import HFConfig
from moerl.models.hf_config import positive, required
from moerl.models.moe_decoder import check_topk

SHARED_FIELDS = frozenset(
    {
        "first_k_dense_replace",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "routed_scaling_factor",
        "scoring_func",
        "topk_group",
        "topk_method",
    }
)
"""Of config.json, read or checked by whoever calls these."""


def shared_expert_sizes(hf: HFConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `DecoderShape` for experts; `sizes`: what `attention_sizes` read.

    Raises:
        CheckpointError: a field is missing or has a value that is not supported.
    """
    experts = positive(hf, "n_routed_experts", "num_local_experts", "num_experts")
    check_topk(sizes["topk"], experts, "n_routed_experts")
    dense, shared = required(hf, int, "first_k_dense_replace"), required(hf, int, "n_shared_experts")
    if not 0 <= dense <= sizes["layers"]:
        raise CheckpointError(
            f"config.json: first_k_dense_replace is {dense}; it must be between 0 and {sizes['layers']} layers"
        )
    if shared < 1:
        raise CheckpointError(f"config.json: n_shared_experts is {shared}; this family has at least 1")
    return {
        "experts": experts,
        "is_moe": tuple(layer >= dense for layer in range(sizes["layers"])),
        "shared_width": sizes["expert_width"] * shared,
        "shared_name": "shared_experts",
    }


def scaling_factor(hf: HFConfig) -> float:
    """On the weights of a token's experts.

    Raises:
        CheckpointError: it is missing, or not above 0.
    """
    factor = required(hf, float, "routed_scaling_factor")
    if factor <= 0:
        raise CheckpointError(f"config.json: routed_scaling_factor is {factor}; it must be above 0")
    return factor
