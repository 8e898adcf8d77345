"""Llama (2, 3, 3.1 to 3.3) and what is built like it: no experts; rotary embedding plain or scaled as in Llama 3.1."""

from __future__ import annotations

from typing import Any

from moerl.models.dense_decoder import DENSE_FIELDS, DenseDecoder
from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import llama3_rope, refuse_active
from moerl.models.moe_decoder import DecoderShape, decoder_kwargs


@families.register(
    "llama",
    NoArguments,
    architectures=("LlamaForCausalLM",),
    covers=("no experts", "tied", "llama3 rope scaling"),
    verified=EXACT,
)
class Llama(DenseDecoder):
    """The family."""

    known = DENSE_FIELDS | {"mlp_bias", "pretraining_tp"}
    has_qk_norm = False

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked; `pretraining_tp` says in how many pieces a product was once computed."""
        refuse_active(hf, "mlp_bias")
        return super().shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings."""
        base, factor = llama3_rope(hf)
        scaling = {} if factor is None else {"rope_scaling": True, "rope_scaling_factor": factor}
        return decoder_kwargs(self.shape(hf), hf) | {"rotary_base": base, "rotary_percent": 1.0} | scaling
