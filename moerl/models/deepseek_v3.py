"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, sigmoid routers, shared experts, the first layers dense.

Their last layers, which predict the token after next (multi-token prediction), are neither read nor written: engines
use them for speculative decoding alone, and transformers drops them too.
"""

from __future__ import annotations

from typing import Any, ClassVar

from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import refuse_active, refuse_unknown, required
from moerl.models.latent_attention import LATENT_FIELDS, LATENT_HARMLESS, latent_kwargs
from moerl.models.moe_decoder import COMMON_FIELDS, DecoderFamily, DecoderShape, decoder_kwargs, latent_sizes
from moerl.models.sigmoid_router import SIGMOID_FIELDS, prediction_layers, sigmoid_router, sigmoid_sizes

COVERS = (
    "tied",
    "dense layers",
    "latent attention",
    "YaRN",
    "shared experts",
    "expert bias",
    "expert groups",
    "not read: MTP",
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

    def ignored_names(self, hf: HFConfig) -> tuple[str, ...]:
        """Also the layers of multi-token prediction."""
        return super().ignored_names(hf) + prediction_layers(hf, self.shape(hf).layers)


@families.register("deepseek_v3", NoArguments, architectures=("DeepseekV3ForCausalLM",), covers=COVERS, verified=EXACT)
class DeepseekV3(DeepseekV3Layers):
    """The family."""
