"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, sigmoid routers, shared experts, the first layers dense.

Their last layers, which predict the token after next (multi-token prediction), go from checkpoint to checkpoint as they
are stored: engines use them for speculative decoding alone, nothing trains them, and transformers drops them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from moerl.models.family import EXACT, PREDICTION, HFConfig, NoArguments, families
from moerl.models.hf_config import refuse_active, refuse_unknown, required
from moerl.models.latent_attention import LATENT_FIELDS, LATENT_HARMLESS, latent_kwargs
from moerl.models.moe_decoder import (
    COMMON_FIELDS,
    DecoderFamily,
    DecoderShape,
    decoder_kwargs,
    latent_sizes,
    prediction_layers,
)
from moerl.models.sigmoid_router import SIGMOID_FIELDS, num_prediction_layers, sigmoid_router, sigmoid_sizes

COVERS = (
    "tied",
    "dense layers",
    "latent attention",
    "YaRN",
    "shared experts",
    "expert bias",
    "expert groups",
    "MTP carried (not trained)",
)


class DeepseekV3Layers(DecoderFamily):
    """Families of such layers, which may differ in how config.json says which are dense."""

    known: ClassVar[frozenset[str]] = COMMON_FIELDS | LATENT_FIELDS | LATENT_HARMLESS | SIGMOID_FIELDS
    """Fields of config.json that it reads or checks."""

    def num_dense(self, hf: HFConfig, layers: int) -> int:
        """How many of the first `layers` have no experts."""
        return required(hf, int, "first_k_dense_replace")

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        refuse_unknown(hf, self.known)
        refuse_active(hf, "hidden_act", ("silu",))
        sizes = latent_sizes(hf)
        dense = self.num_dense(hf, sizes["layers"])
        return DecoderShape(
            **sizes,
            **sigmoid_sizes({**hf, "first_k_dense_replace": dense}, sizes),
            is_tied=required(hf, bool, "tie_word_embeddings"),
        )

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings."""
        shape = self.shape(hf)
        assert shape.latent is not None
        return decoder_kwargs(shape, hf) | sigmoid_router(hf, shape) | latent_kwargs(shape.latent, hf)

    def carried_names(self, hf: HFConfig) -> Mapping[str, tuple[str, ...]]:
        """Also the layers of multi-token prediction, numbered on from the decoder's."""
        return {
            **super().carried_names(hf),
            PREDICTION: prediction_layers(self.shape(hf).layers, num_prediction_layers(hf)),
        }


@families.register("deepseek_v3", NoArguments, architectures=("DeepseekV3ForCausalLM",), covers=COVERS, verified=EXACT)
class DeepseekV3(DeepseekV3Layers):
    """The family."""
