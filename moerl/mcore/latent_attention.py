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

from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.mcore.local_spec import PackedAngles
from moerl.mcore.norms import RMSNorm

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
