"""Multi-head latent attention on packed sequences without TransformerEngine.

What megatron's own layer does otherwise with local layers:

- without a latent of the queries it cannot be built with norms of the latents (it asks for a fused norm and product);
- the rotated key that all heads share comes out of a gather whose backward takes this rank's part and adds nothing up,
  so that under tensor parallelism the gradient of the other ranks' heads would be missing from it;
- the norms of the latents have the epsilon of all others, where the models' is 1e-6 whatever config.json says;
- values are padded to the width of queries, and values that are wider than queries would be cut.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.mcore.local_spec import PackedLayout, RMSNorm

LATENT_EPS = 1e-6
"""Of the norms of latents, in DeepSeek's own code and in transformers'."""

SAVED_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Names that norms have in a checkpoint: those of TransformerEngine's fused layers, as megatron does for other
attention; the norm before latent attention is not fused there either, and keeps its name."""


class LatentNorm(RMSNorm):
    """Norm of a latent."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = LATENT_EPS, **_: Any) -> None:
        """`eps`, which megatron takes from the settings of all norms, has no say."""
        super().__init__(config, hidden_size, LATENT_EPS)


class PackedAngles(torch.nn.Module):
    """Angles by row; stands in the place of an attention's rotary embedding."""

    def __init__(self, inner: Any) -> None:
        """`inner`: megatron's embedding, plain or YaRN."""
        super().__init__()
        self.inner = inner
        self.angles: Tensor | None = None
        if isinstance(inner, YarnRotaryEmbedding):  # tables for fused kernels
            inner.register_buffer("cos_cached", None, persistent=False)
            inner.register_buffer("sin_cached", None, persistent=False)

    def get_rotary_seq_len(self, *args: Any) -> int:
        """As in core; remembers the positions for the `forward` that follows."""
        layout = next(argument for argument in args if isinstance(argument, PackedLayout))
        self.angles = layout.angles
        return int(layout.max_seqlen_q)

    def forward(self, max_seq_len: int, *, packed_seq: bool) -> Tensor | tuple[Tensor, float]:
        """[all_rows, 1, 1, d] angles; of YaRN also the factor on cosines and sines."""
        assert packed_seq
        assert self.angles is not None
        if isinstance(self.inner, YarnRotaryEmbedding):
            table, scale = self.inner.get_emb(max_seq_len)
            return table.index_select(0, self.angles), float(scale)
        return self.inner.get_emb(max_seq_len).index_select(0, self.angles)


class LatentAttention(MLASelfAttention):
    """Megatron's layer with the four points above put right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = PackedAngles(self.rotary_pos_emb)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        parts = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in parts} | {
            "q_layernorm": IdentityOp if self.config.q_lora_rank is None else LatentNorm,
            "kv_layernorm": LatentNorm,
        }

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, 1, h] -> this rank's rows of both latents, in full width.

        Core then gathers the shared key over the rows, which adds gradients up on the way back.
        """
        query = hidden_states
        if self.config.q_lora_rank is not None:
            query = self._whole(self.linear_q_down_proj(hidden_states)[0])
        return query, self._whole(self.linear_kv_down_proj(hidden_states)[0])

    def _whole(self, part: Tensor) -> Tensor:
        if self.config.tensor_model_parallel_size == 1:
            return part
        assert self.config.sequence_parallel
        gathered = gather_from_tensor_model_parallel_region(part, group=self.pg_collection.tp)
        return scatter_to_sequence_parallel_region(gathered, group=self.pg_collection.tp)

    def _run_core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        attn_mask_type: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Values have a width of their own."""
        return self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
