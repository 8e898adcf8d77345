"""What decoders without experts share: every layer has one feed-forward part."""

from __future__ import annotations

from typing import Any, ClassVar

from moerl.models.family import HFConfig
from moerl.models.hf_config import refuse_active, refuse_unknown, required
from moerl.models.moe_decoder import COMMON_FIELDS, DecoderFamily, DecoderShape, attention_sizes

DENSE_FIELDS = (
    COMMON_FIELDS - {"moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok", "num_local_experts"}
) | {"attention_bias"}
"""Of config.json, which all of them read or check."""


class DenseDecoder(DecoderFamily):
    """A family of them."""

    known: ClassVar[frozenset[str]]
    """Fields of config.json that it reads or checks."""
    has_qk_norm: ClassVar[bool]

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked; a bias on the projections would be on attention's output too, which has none."""
        refuse_unknown(hf, self.known)
        refuse_active(hf, "hidden_act", ("silu",))
        refuse_active(hf, "attention_bias")
        sizes: dict[str, Any] = attention_sizes(hf, has_experts=False)
        return DecoderShape(
            **sizes,
            experts=0,
            is_moe=(False,) * sizes["layers"],
            is_tied=required(hf, bool, "tie_word_embeddings"),
            has_qk_norm=self.has_qk_norm,
        )
