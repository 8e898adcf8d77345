"""DeepSeek-V2-Lite and models of its kind: latent attention, a softmax over all experts, shared experts.

The larger DeepSeek-V2 scores a group of experts by its best one; megatron-core adds as many of the best as a token
takes of each group, which is the same for one alone. So it is refused.
"""

from __future__ import annotations

from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import refuse_active, refuse_unknown, required
from moerl.models.latent_attention import LATENT_FIELDS, LATENT_HARMLESS, latent_kwargs
from moerl.models.moe_decoder import COMMON_FIELDS, DecoderFamily, DecoderShape, decoder_kwargs, latent_sizes
from moerl.models.shared_experts import SHARED_FIELDS, scaling_factor, shared_expert_sizes

_KNOWN = COMMON_FIELDS | LATENT_FIELDS | LATENT_HARMLESS | SHARED_FIELDS | {"mlp_bias", "num_experts"}
_GREEDY, _BY_GROUPS = "greedy", "group_limited_greedy"


def _read_shape(hf: HFConfig) -> DecoderShape:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "hidden_act", ("silu",))
    refuse_active(hf, "mlp_bias")
    refuse_active(hf, "norm_topk_prob")
    refuse_active(hf, "scoring_func", (None, "softmax"))
    sizes = latent_sizes(hf)
    return DecoderShape(
        **sizes,
        **shared_expert_sizes(hf, sizes),
        is_tied=required(hf, bool, "tie_word_embeddings"),
    )


def _groups(hf: HFConfig, shape: DecoderShape) -> dict[str, Any]:
    method = required(hf, str, "topk_method")
    if method == _GREEDY:
        return {}
    if method != _BY_GROUPS:
        raise CheckpointError(
            f"config.json: topk_method is {method!r}, which is not supported (allowed: {_GREEDY!r}, {_BY_GROUPS!r})"
        )
    groups, chosen = required(hf, int, "n_group"), required(hf, int, "topk_group")
    if not 1 <= chosen <= groups or shape.experts % groups:
        raise CheckpointError(
            f"config.json: topk_group is {chosen} and n_group {groups}, with {shape.experts} experts; groups must be "
            "equal, and no more of them chosen than there are"
        )
    if chosen == groups:  # every group is in the running: no limit
        return {}
    if shape.topk != chosen:
        raise CheckpointError(
            f"config.json: {shape.topk} experts per token from {chosen} of {groups} groups by {_BY_GROUPS!r}, which "
            "scores a group by its best expert; megatron-core would add the best "
            f"{shape.topk // chosen} of each and choose other experts for many tokens, so this model is not supported"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


@families.register(
    "deepseek_v2",
    NoArguments,
    architectures=("DeepseekV2ForCausalLM",),
    covers=(
        "tied",
        "dense layers",
        "latent attention",
        "YaRN",
        "shared experts",
        "not read: the larger V2, by its groups",
    ),
    verified=EXACT,
)
class DeepseekV2(DecoderFamily):
    """The family."""

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        return _read_shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings: weights are probabilities over all experts, as they are, times a factor."""
        shape = _read_shape(hf)
        assert shape.latent is not None
        return (
            decoder_kwargs(shape, hf)
            | latent_kwargs(shape.latent, hf)
            | _groups(hf, shape)
            | {
                "moe_router_score_function": "softmax",
                "moe_router_pre_softmax": True,
                "moe_router_topk_scaling_factor": scaling_factor(hf),
            }
        )
