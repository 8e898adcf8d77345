"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, sigmoid routers, shared experts, the first layers dense.

Their last layers, which predict the token after next (multi-token prediction), are neither read nor written: engines
use them for speculative decoding alone, and transformers drops them too.
"""

from __future__ import annotations

from typing import Any

from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import refuse_active, refuse_unknown, required
from moerl.models.latent_attention import LATENT_FIELDS, latent_kwargs, read_latent
from moerl.models.moe_decoder import COMMON_FIELDS, DecoderFamily, DecoderShape, attention_sizes, decoder_kwargs
from moerl.models.sigmoid_router import SIGMOID_FIELDS, prediction_layers, sigmoid_router, sigmoid_sizes

_HARMLESS = frozenset({"auto_map", "aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"})
"""Of released files: code to load, the balancing loss of pretraining, layouts of other trainers."""
_KNOWN = COMMON_FIELDS | LATENT_FIELDS | SIGMOID_FIELDS | _HARMLESS | {"moe_layer_freq"}


def _read_shape(hf: HFConfig) -> DecoderShape:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "hidden_act", ("silu",))
    refuse_active(hf, "moe_layer_freq", (None, 1))
    latent = read_latent(hf)
    heads = required(hf, int, "num_attention_heads")
    sizes = attention_sizes({**hf, "num_key_value_heads": heads, "head_dim": latent.head_dim})
    return DecoderShape(
        **sizes,
        **sigmoid_sizes(hf, sizes),
        latent=latent,
        is_tied=required(hf, bool, "tie_word_embeddings"),
    )


@families.register(
    "deepseek_v3",
    NoArguments,
    architectures=("DeepseekV3ForCausalLM",),
    covers=(
        "tied",
        "dense layers",
        "latent attention",
        "YaRN",
        "shared experts",
        "expert bias",
        "expert groups",
        "not read: MTP",
    ),
    verified=EXACT,
)
class DeepseekV3(DecoderFamily):
    """The family."""

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        return _read_shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings."""
        shape = _read_shape(hf)
        assert shape.latent is not None
        return decoder_kwargs(shape, hf) | sigmoid_router(hf, shape) | latent_kwargs(shape.latent, hf)

    def ignored_names(self, hf: HFConfig) -> tuple[str, ...]:
        """Also the layers of multi-token prediction."""
        return super().ignored_names(hf) + prediction_layers(hf, _read_shape(hf).layers)
