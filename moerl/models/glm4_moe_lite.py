"""GLM-4.7-Flash: DeepSeek-V3's layers under another name, with a list that says which of them are dense.

Layers of multi-token prediction are neither read nor written, as in `deepseek_v3`.
"""

from __future__ import annotations

from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import refuse_active, refuse_unknown, required
from moerl.models.latent_attention import LATENT_FIELDS, LATENT_HARMLESS, latent_kwargs
from moerl.models.moe_decoder import COMMON_FIELDS, DecoderFamily, DecoderShape, decoder_kwargs, latent_sizes
from moerl.models.sigmoid_router import SIGMOID_FIELDS, prediction_layers, sigmoid_router, sigmoid_sizes

_KNOWN = COMMON_FIELDS | LATENT_FIELDS | LATENT_HARMLESS | SIGMOID_FIELDS | {"mlp_layer_types"}
_DENSE, _SPARSE = "dense", "sparse"


def _num_dense(hf: HFConfig, layers: int) -> int:
    """Of the first layers; said by a list, a number, or both."""
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        return required(hf, int, "first_k_dense_replace")
    dense = kinds.count(_DENSE) if isinstance(kinds, list) else -1
    if kinds != [_DENSE] * dense + [_SPARSE] * (layers - dense):
        raise CheckpointError(
            f"config.json: mlp_layer_types is {kinds!r}; {layers} layers are needed, first {_DENSE!r} ones, then "
            f"{_SPARSE!r} ones"
        )
    refuse_active(hf, "first_k_dense_replace", (None, dense))
    return dense


def _read_shape(hf: HFConfig) -> DecoderShape:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "hidden_act", ("silu",))
    sizes = latent_sizes(hf)
    dense = _num_dense(hf, sizes["layers"])
    return DecoderShape(
        **sizes,
        **sigmoid_sizes({**hf, "first_k_dense_replace": dense}, sizes),
        is_tied=required(hf, bool, "tie_word_embeddings"),
    )


@families.register(
    "glm4_moe_lite",
    NoArguments,
    architectures=("Glm4MoeLiteForCausalLM",),
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
class Glm4MoeLite(DecoderFamily):
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
