"""Qwen3 without experts (0.6B to 32B): grouped-query attention with per-head q/k norm; the small ones are tied."""

from __future__ import annotations

from typing import Any

from moerl.models.dense_decoder import DENSE_FIELDS, DenseDecoder
from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import refuse_active, refuse_other_attention
from moerl.models.moe_decoder import DecoderShape, decoder_kwargs
from moerl.models.yarn import yarn_or_plain_rope


@families.register(
    "qwen3",
    NoArguments,
    architectures=("Qwen3ForCausalLM",),
    covers=("no experts", "tied", "YaRN"),
    verified=EXACT,
)
class Qwen3(DenseDecoder):
    """The family."""

    known = DENSE_FIELDS | {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
    has_qk_norm = True

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        refuse_active(hf, "use_sliding_window")
        refuse_other_attention(hf)
        return super().shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings."""
        return decoder_kwargs(self.shape(hf), hf) | yarn_or_plain_rope(hf)
