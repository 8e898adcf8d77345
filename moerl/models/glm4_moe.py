"""GLM-4.5 and 4.6 (355B, Air): sigmoid router with a bias for the choice, shared experts, the first layers dense.

Their last layer, which predicts the token after next (multi-token prediction), goes from checkpoint to checkpoint as it
is stored: engines use it for speculative decoding alone, nothing trains it, and transformers drops it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moerl.models.family import EXACT, PREDICTION, HFConfig, NoArguments, families
from moerl.models.hf_config import partial_rope, refuse_active, refuse_unknown, required
from moerl.models.moe_decoder import (
    COMMON_FIELDS,
    DecoderFamily,
    DecoderShape,
    attention_sizes,
    decoder_kwargs,
    prediction_layers,
)
from moerl.models.sigmoid_router import SIGMOID_FIELDS, num_prediction_layers, sigmoid_router, sigmoid_sizes

_KNOWN = COMMON_FIELDS | SIGMOID_FIELDS | {"attention_bias", "use_qk_norm"}


def _read_shape(hf: HFConfig) -> DecoderShape:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "hidden_act", ("silu",))
    sizes = attention_sizes(hf)
    return DecoderShape(
        **sizes,
        **sigmoid_sizes(hf, sizes),
        is_tied=required(hf, bool, "tie_word_embeddings"),
        has_qk_norm=required(hf, bool, "use_qk_norm"),
        has_qkv_bias=required(hf, bool, "attention_bias"),
    )


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
        "MTP carried (not trained)",
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
        return decoder_kwargs(shape, hf) | sigmoid_router(hf, shape) | {"rotary_base": base, "rotary_percent": fraction}

    def carried_names(self, hf: HFConfig) -> Mapping[str, tuple[str, ...]]:
        """Also the layers of multi-token prediction, numbered on from the decoder's."""
        return {
            **super().carried_names(hf),
            PREDICTION: prediction_layers(_read_shape(hf).layers, num_prediction_layers(hf)),
        }
