"""GLM-4.5 and 4.6 (355B, Air): sigmoid router with a bias for the choice, shared experts, the first layers dense.

Their last layer, which predicts the token after next (multi-token prediction), is neither read nor written: engines use
it for speculative decoding alone, and transformers drops it too.
"""

from __future__ import annotations

from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import partial_rope, refuse_active, refuse_unknown, required
from moerl.models.moe_decoder import (
    COMMON_FIELDS,
    DecoderFamily,
    DecoderShape,
    attention_sizes,
    check_topk,
    decoder_kwargs,
)

_KNOWN = COMMON_FIELDS | {
    "attention_bias",
    "first_k_dense_replace",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
    "use_qk_norm",
}
_PER_GROUP = 2
"""Experts whose scores make the score of a group, in transformers; Megatron takes experts per token over groups."""


def _read_shape(hf: HFConfig) -> DecoderShape:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "hidden_act", ("silu",))
    refuse_active(hf, "scoring_func", (None, "sigmoid"))
    refuse_active(hf, "topk_method", (None, "noaux_tc"))
    sizes = attention_sizes(hf)
    experts = required(hf, int, "n_routed_experts", "num_local_experts")
    check_topk(sizes["topk"], experts, "n_routed_experts")
    dense, shared = required(hf, int, "first_k_dense_replace"), required(hf, int, "n_shared_experts")
    if not 0 <= dense <= sizes["layers"]:
        raise CheckpointError(
            f"config.json: first_k_dense_replace is {dense}; it must be between 0 and {sizes['layers']} layers"
        )
    if shared < 1:
        raise CheckpointError(f"config.json: n_shared_experts is {shared}; this family has at least 1")
    return DecoderShape(
        **sizes,
        experts=experts,
        is_moe=tuple(layer >= dense for layer in range(sizes["layers"])),
        is_tied=required(hf, bool, "tie_word_embeddings"),
        has_qk_norm=required(hf, bool, "use_qk_norm"),
        has_qkv_bias=required(hf, bool, "attention_bias"),
        has_expert_bias=True,
        shared_width=sizes["expert_width"] * shared,
        shared_name="shared_experts",
    )


def _router(hf: HFConfig, shape: DecoderShape) -> dict[str, Any]:
    """Scores are sigmoids; a token's weights are those of its experts over their sum, times a factor."""
    is_normalised = required(hf, bool, "norm_topk_prob")
    if is_normalised != (shape.topk > 1):  # Megatron divides by the sum for more than one expert, and only then
        raise CheckpointError(
            f"config.json: norm_topk_prob is {is_normalised} with num_experts_per_tok {shape.topk}, which Megatron's "
            "sigmoid router cannot do (it divides by the sum exactly where there is more than one)"
        )
    factor = required(hf, float, "routed_scaling_factor")
    if factor <= 0:
        raise CheckpointError(f"config.json: routed_scaling_factor is {factor}; it must be above 0")
    settings: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": factor,
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


@families.register(
    "glm4_moe",
    NoArguments,
    architectures=("Glm4MoeForCausalLM",),
    covers=(
        "tied",
        "dense layers",
        "attention biases",
        "shared experts",
        "expert bias",
        "expert groups",
        "not read: MTP",
    ),
    verified=EXACT,
)
class Glm4Moe(DecoderFamily):
    """The family."""

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        return _read_shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings; part of each head is rotated."""
        shape = _read_shape(hf)
        base, fraction = partial_rope(hf)
        return decoder_kwargs(shape, hf) | _router(hf, shape) | {"rotary_base": base, "rotary_percent": fraction}

    def ignored_names(self, hf: HFConfig) -> tuple[str, ...]:
        """Also the layers of multi-token prediction, numbered on from the decoder's."""
        shape = _read_shape(hf)
        counts = [hf.get(name) or 0 for name in ("num_nextn_predict_layers", "num_mtp_layers")]
        extra = tuple(rf"model\.layers\.{shape.layers + i}\..*" for i in range(max(counts)))
        return super().ignored_names(hf) + extra
