"""Mixtral (8x7B, 8x22B): a softmax router whose weights are always renormalised; `intermediate_size` is the experts'.

On disk experts live under `block_sparse_moe`, their matrices are w1 (gate), w3 (up) and w2 (down).
"""

from __future__ import annotations

from typing import Any

from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import plain_rope_theta, positive, refuse_active, refuse_unknown, required
from moerl.models.moe_decoder import (
    COMMON_FIELDS,
    DecoderFamily,
    DecoderShape,
    attention_sizes,
    check_topk,
    decoder_kwargs,
)

_KNOWN = (COMMON_FIELDS - {"moe_intermediate_size", "norm_topk_prob"}) | {"router_jitter_noise", "sliding_window"}


@families.register(
    "mixtral", NoArguments, architectures=("MixtralForCausalLM",), covers=("tied", "routed experts"), verified=EXACT
)
class Mixtral(DecoderFamily):
    """The family."""

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked; noise on the routers' inputs (`router_jitter_noise`) is a setting of training."""
        refuse_unknown(hf, _KNOWN)
        refuse_active(hf, "hidden_act", ("silu",))
        refuse_active(hf, "sliding_window")
        width = positive(hf, "intermediate_size")
        sizes = attention_sizes({**hf, "moe_intermediate_size": width})
        experts = positive(hf, "num_local_experts")
        check_topk(sizes["topk"], experts, "num_local_experts")
        return DecoderShape(
            **sizes,
            experts=experts,
            is_moe=(True,) * sizes["layers"],
            is_tied=required(hf, bool, "tie_word_embeddings"),
            moe_name="block_sparse_moe",
            expert_parts=("w1", "w3", "w2"),
        )

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings: a softmax over the chosen logits is the renormalised softmax over all."""
        return decoder_kwargs(self.shape(hf), hf) | {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,
            "rotary_base": plain_rope_theta(hf),
            "rotary_percent": 1.0,
        }
