"""What megatron's local layer spec lacks for packed sequences without TransformerEngine: attention, norm, positions.

Core attention of the local spec refuses packed (THD) input, and its THD rotary embedding works sequence by sequence.
Here packed queries, keys and values are spread to right-padded [n, smax] once per call, so that plain causal attention
is exact (a query never sees what comes after it) and no [t, t] mask is built.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.mcore.router_replay import ReplayRouter
from moerl.types import MicroBatch


@dataclasses.dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's packed-sequence parameters, and the index maps of this room's attention."""

    position_ids: Tensor | None = None
    """[t] int64."""
    spread: Tensor | None = None
    """[n * smax] int64: the packed row of each padded place (0 where there is none); None: no padding is needed."""
    collect: Tensor | None = None
    """[t] int64: the padded place of each packed row."""
    num_seqs: int = 0


def packed_layout(batch: MicroBatch, *, use_te: bool) -> PackedLayout:
    """The layout of one micro-batch; made once per forward and shared by every layer."""
    lengths = batch.cu_seqlens.diff().long()
    count, longest = batch.num_seqs, int(lengths.max())
    spread = collect = None
    if count * longest != batch.num_tokens:
        place = torch.arange(longest, device=lengths.device)
        starts = batch.cu_seqlens[:-1].long()
        spread = torch.where(place < lengths[:, None], starts[:, None] + place, 0).flatten()
        collect = batch.seq_ids * longest + batch.position_ids
    # Megatron's rotation cuts the pack where these bounds say; `PackedRotaryEmbedding` gives every row its own angle,
    # so one cut is enough (TransformerEngine's fused rotation has no such angles and needs the true bounds).
    whole: Any = None if use_te else batch.cu_seqlens.new_tensor([0, batch.num_tokens])
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=batch.position_ids,
        spread=spread,
        collect=collect,
        num_seqs=count,
    )


class PackedAttention(MegatronModule):
    """Causal self-attention over packed sequences, by torch's scaled_dot_product_attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        """The arguments of megatron's core attentions; what is not named here does not apply to this one."""
        super().__init__(config=config)
        head_dim = config.kv_channels
        assert head_dim is not None
        self.layer_number = layer_number
        self.scale = softmax_scale or 1.0 / math.sqrt(head_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedLayout,
        **_: Any,
    ) -> Tensor:
        """[t, heads, d] each (fewer heads in key and value under grouped queries) -> [t, heads * d]."""
        layout = packed_seq_params
        query, key, value = (self._spread(x, layout) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            dropout_p=self.config.attention_dropout if self.training else 0.0,
        )
        out = out.transpose(1, 2).flatten(0, 1).flatten(1)
        return out if layout.collect is None else out.index_select(0, layout.collect)

    @staticmethod
    def _spread(packed: Tensor, layout: PackedLayout) -> Tensor:
        """[t, heads, d] -> [n, heads, smax, d]."""
        if layout.spread is not None:
            packed = packed.index_select(0, layout.spread)
        return packed.unflatten(0, (layout.num_seqs, -1)).transpose(1, 2)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """No parameters, nothing to save."""
        return {}


class RMSNorm(torch.nn.Module):
    """RMSNorm in float32, its weight marked for the sequence-parallel gradient sum (torch's wrapped one refuses it)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """`hidden_size` is the width that is normalised: the head dimension for query and key norms."""
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue] megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight.float(), self.eps)
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Angles by packed row, so that one rotation serves all sequences.

    Megatron's THD rotation takes angles of the pack's total length as exact positions; given angles by position it
    would rotate sequence after sequence, each with its own copy, which costs more than the rest of attention on small
    models.
    """

    position_ids: Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, packed_seq_params: PackedLayout | None = None, **kwargs: Any) -> int:
        """As in core; remembers the pack's positions for the `forward` that follows."""
        layout = packed_seq_params or next(a for a in args if isinstance(a, PackedLayout))
        self.position_ids = layout.position_ids
        return int(layout.max_seqlen_q)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """[t, 1, 1, d] angles."""
        assert packed_seq
        assert self.position_ids is not None
        return self.get_emb(max_seq_len, offset).index_select(0, self.position_ids)


def block_spec(config: TransformerConfig, *, use_te: bool, vp_stage: int | None = None) -> Any:
    """Megatron's decoder spec with this room's router; without TransformerEngine, its attention and norm too."""
    spec: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_te, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        parts: Any = layer.submodules
        parts.mlp = _with_replay_router(parts.mlp)
        if use_te:
            continue
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) is not IdentityOp:
                setattr(attention, name, RMSNorm)
    if not use_te:
        spec.layer_norm = RMSNorm
    return spec


def _with_replay_router(mlp: Any) -> Any:
    """The builder of an MoE layer with `ReplayRouter`; a dense layer's builder as it is."""
    submodules = mlp.keywords.get("submodules")
    if not isinstance(submodules, MoESubmodules):
        return mlp
    replaced = dataclasses.replace(submodules, router=ReplayRouter)
    return functools.partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": replaced})
