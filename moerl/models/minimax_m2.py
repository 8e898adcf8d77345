"""MiniMax-M2 and M2.5: norms of queries and keys over all heads, partial rotation, a sigmoid router with a bias.

`intermediate_size` is the experts'; their names are Mixtral's. The bias lies beside the router, not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import EXACT, PREDICTION, HFConfig, NoArguments, families
from moerl.models.hf_config import count, listed, partial_rope, positive, refuse_active, refuse_unknown, required
from moerl.models.moe_decoder import (
    COMMON_FIELDS,
    DecoderFamily,
    DecoderShape,
    attention_sizes,
    check_topk,
    decoder_kwargs,
    prediction_layers,
)

_INACTIVE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "layernorm_full_attention_beta": (None, 1, 1.0),
    "layernorm_linear_attention_beta": (None, 1, 1.0),
    "layernorm_mlp_beta": (None, 1, 1.0),
    "qk_norm_type": (None, "per_layer"),
    "scoring_func": (None, "sigmoid"),
    "shared_intermediate_size": (None, 0),
    "sliding_window": (None,),
    "use_qk_norm": (None, True),
    "use_routing_bias": (None, True),
}
"""Fields that only the released files have, or that have one value; what else they might say is not built."""
_KNOWN = (COMMON_FIELDS - {"moe_intermediate_size", "norm_topk_prob"}) | frozenset(
    {
        *_INACTIVE,
        "attn_type_list",
        "mlp_intermediate_size",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "rotary_dim",
        "router_jitter_noise",
        "shared_moe_mode",
        "use_mtp",
    }
)


@families.register(
    "minimax_m2",
    NoArguments,
    architectures=("MiniMaxM2ForCausalLM",),
    covers=("tied", "routed experts", "expert bias", "q/k norm over all heads", "MTP carried (not trained)"),
    verified=EXACT,
)
class MiniMaxM2(DecoderFamily):
    """The family."""

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked; noise on the routers' inputs (`router_jitter_noise`) is a setting of training."""
        refuse_unknown(hf, _KNOWN)
        for name, allowed in _INACTIVE.items():
            refuse_active(hf, name, allowed)
        if set(listed(hf, "attn_type_list", int)) - {1}:
            raise CheckpointError(
                f"config.json: attn_type_list is {hf['attn_type_list']}; only 1, full attention, is built"
            )
        width = positive(hf, "intermediate_size")
        sizes = attention_sizes({**hf, "moe_intermediate_size": width})
        experts = positive(hf, "num_local_experts")
        check_topk(sizes["topk"], experts, "num_local_experts")
        if sizes["topk"] < 2:
            raise CheckpointError(
                "config.json: num_experts_per_tok is 1, whose weight this family makes 1 and Megatron's sigmoid router "
                "leaves as it is"
            )
        return DecoderShape(
            **sizes,
            experts=experts,
            is_moe=(True,) * sizes["layers"],
            is_tied=required(hf, bool, "tie_word_embeddings"),
            has_qk_norm=True,
            has_wide_qk_norm=True,
            has_expert_bias=True,
            expert_bias_name="e_score_correction_bias",
            moe_name="block_sparse_moe",
            expert_parts=("w1", "w3", "w2"),
        )

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings; the released files say in channels how much of a head is rotated (`rotary_dim`)."""
        shape = self.shape(hf)
        if hf.get("rotary_dim") is not None:
            share = positive(hf, "rotary_dim") / shape.head_dim
            if hf.get("partial_rotary_factor") not in (None, share):
                raise CheckpointError(
                    f"config.json: rotary_dim {hf['rotary_dim']} of {shape.head_dim} and partial_rotary_factor "
                    f"{hf['partial_rotary_factor']} contradict each other; keep one of them"
                )
            hf = {**hf, "partial_rotary_factor": share}
        base, fraction = partial_rope(hf)
        return decoder_kwargs(shape, hf) | {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "rotary_base": base,
            "rotary_percent": fraction,
        }

    def carried_names(self, hf: HFConfig) -> Mapping[str, tuple[str, ...]]:
        """Also the layers of multi-token prediction, which engines look for after the decoder's."""
        modules = count(hf, "num_mtp_modules") if hf.get("use_mtp") else 0
        predicted = modules * (count(hf, "mtp_transformer_layers") or 1)
        return {**super().carried_names(hf), PREDICTION: prediction_layers(self.shape(hf).layers, predicted)}
