"""What families with sigmoid routers share (DeepSeek-V3, arXiv 2412.19437, and GLM-4.5): dense first layers, shared
experts, a bias for the choice, groups of experts, and layers of multi-token prediction, which nothing here trains.
"""

from __future__ import annotations

from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import HFConfig
from moerl.models.hf_config import count, refuse_active, required
from moerl.models.moe_decoder import DecoderShape
from moerl.models.shared_experts import SHARED_FIELDS, scaling_factor, shared_expert_sizes

SIGMOID_FIELDS = SHARED_FIELDS | {"num_mtp_layers", "num_nextn_predict_layers"}
"""Of config.json, read or checked here."""
_PER_GROUP = 2
"""Experts whose scores make the score of a group, in transformers; Megatron takes experts per token over groups."""


def sigmoid_sizes(hf: HFConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `DecoderShape` for experts; `sizes`: what `attention_sizes` read.

    Raises:
        CheckpointError: a field is missing or has a value that is not supported.
    """
    refuse_active(hf, "scoring_func", (None, "sigmoid"))
    refuse_active(hf, "topk_method", (None, "noaux_tc"))
    return shared_expert_sizes(hf, sizes) | {"has_expert_bias": True}


def sigmoid_router(hf: HFConfig, shape: DecoderShape) -> dict[str, Any]:
    """Megatron settings: scores are sigmoids; a token's weights are its experts' over their sum, times a factor.

    Raises:
        CheckpointError: a field is missing or has a value that Megatron's router does not compute.
    """
    is_normalised = required(hf, bool, "norm_topk_prob")
    if is_normalised != (shape.topk > 1):  # Megatron divides by the sum for more than one expert, and only then
        raise CheckpointError(
            f"config.json: norm_topk_prob is {is_normalised} with num_experts_per_tok {shape.topk}, which Megatron's "
            "sigmoid router cannot do (it divides by the sum exactly where there is more than one)"
        )
    settings: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": scaling_factor(hf),
    }
    groups, chosen = required(hf, int, "n_group"), required(hf, int, "topk_group")
    if not 1 <= chosen <= groups:
        raise CheckpointError(f"config.json: topk_group is {chosen}; it must be between 1 and n_group {groups}")
    if chosen == groups:  # every group is in the running: no limit
        return settings
    if shape.experts % groups or shape.topk != _PER_GROUP * chosen:
        raise CheckpointError(
            f"config.json: {shape.topk} experts per token from {chosen} of {groups} groups of {shape.experts} experts: "
            f"groups must be equal, and the token must take {_PER_GROUP} experts for each group, else Megatron scores "
            "groups differently from transformers"
        )
    return settings | {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def num_prediction_layers(hf: HFConfig) -> int:
    """Layers of multi-token prediction that a checkpoint may have.

    Raises:
        CheckpointError: the field is no whole number from 0.
    """
    return max(count(hf, name) for name in ("num_nextn_predict_layers", "num_mtp_layers"))
