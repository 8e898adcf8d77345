"""Megatron's decoder spec with the parts of this room in it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.mcore.latent_attention import SAVED_NAMES, LatentAttention
from moerl.mcore.local_spec import PackedAttention
from moerl.mcore.norms import HeadNorm, RMSNorm, WideRMSNorm
from moerl.mcore.parallel import Axis
from moerl.mcore.router_replay import ReplayRouter


def block_spec(
    config: TransformerConfig, *, use_te: bool, vp_stage: int | None = None, wide_norms: Axis | None = None
) -> Any:
    """Megatron's decoder spec with this room's router; without TransformerEngine, its attention and norm too.

    `wide_norms`: the tensor axis, where norms of queries and keys span all heads.
    """
    spec: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_te, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        parts: Any = layer.submodules
        parts.mlp = _with_replay_router(parts.mlp)
        if wide_norms is not None:
            _widen(parts.self_attention.submodules, config, wide_norms, stays_wide=not use_te)
        if use_te:
            continue
        if config.add_bias_linear and _has_experts(parts.mlp):
            parts.mlp = _with_expert_output(parts.mlp)
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if _has_experts(parts.mlp):
            # In a checkpoint megatron gives norms the names of TransformerEngine's fused layers; the norm before
            # experts is not fused there either, and keeps its name.
            parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        parts.self_attention.submodules.core_attention = PackedAttention
        if config.multi_latent_attention:
            _latent(parts)
            continue
        attention = parts.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm"):
            if wide_norms is None and getattr(attention, name) is not IdentityOp:
                setattr(attention, name, HeadNorm)
    if not use_te:
        spec.layer_norm = RMSNorm
    return spec


def _widen(attention: Any, config: TransformerConfig, axis: Axis, *, stays_wide: bool) -> None:
    sizes = {"q_layernorm": config.num_attention_heads, "k_layernorm": config.num_query_groups}
    for name, heads in sizes.items():
        setattr(attention, name, functools.partial(WideRMSNorm, heads=heads, axis=axis, stays_wide=stays_wide))


class ExpertOutput(RowParallelLinear):
    """An expert's second product, where it has a bias.

    Megatron adds the bias in place, which autograd refuses on what its identity over one tensor rank returns; and marks
    the bias as one that sees a slice of the tokens, so that gradients of different experts would be added up.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue] megatron's mark

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """As in core, in memory of its own."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def _with_expert_output(mlp: Any) -> Any:
    """The builder of an MoE layer with `ExpertOutput`."""
    submodules = mlp.keywords["submodules"]
    experts = submodules.experts
    inner = dataclasses.replace(experts.keywords["submodules"], linear_fc2=ExpertOutput)
    experts = functools.partial(experts.func, *experts.args, **{**experts.keywords, "submodules": inner})
    replaced = dataclasses.replace(submodules, experts=experts)
    return functools.partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": replaced})


def _latent(parts: Any) -> None:
    parts.self_attention.module = LatentAttention
    names = dict(SAVED_NAMES)
    if not _has_experts(parts.mlp):
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    parts.sharded_state_dict_keys_map = names


def _has_experts(mlp: Any) -> bool:
    return isinstance(mlp.keywords.get("submodules"), MoESubmodules)


def _with_replay_router(mlp: Any) -> Any:
    """The builder of an MoE layer with `ReplayRouter`; a dense layer's builder as it is."""
    if not _has_experts(mlp):
        return mlp
    replaced = dataclasses.replace(mlp.keywords["submodules"], router=ReplayRouter)
    return functools.partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": replaced})
