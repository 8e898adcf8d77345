"""gpt-oss (20b, 120b): attention sinks, every other layer with a sliding window, a clamped gate, biases everywhere.

Files have the experts of a layer in one tensor, stored as [in, out], with a column of the gate and of the up projection
in turn; rules read and write them expert by expert, as `model.layers.N.mlp.experts.E.*`, which no file has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from moerl.errors import CheckpointError
from moerl.models.family import EXACT, FusedSlice, HFConfig, NoArguments, families
from moerl.models.hf_config import positive, refuse_active, refuse_unknown, required
from moerl.models.moe_decoder import (
    COMMON_FIELDS,
    DecoderFamily,
    DecoderShape,
    attention_rules,
    attention_sizes,
    check_topk,
    copy_rule,
    decoder_kwargs,
)
from moerl.models.rules import AlternatingGateUp, Copy, Rule, Transposed
from moerl.models.yarn import yarn_rope

_KNOWN = (COMMON_FIELDS - {"moe_intermediate_size", "norm_topk_prob", "partial_rotary_factor"}) | {
    "attention_bias",
    "experts_per_token",
    "initial_context_length",
    "layer_types",
    "sliding_window",
    "swiglu_alpha",
    "swiglu_limit",
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def _read_shape(hf: HFConfig) -> DecoderShape:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "hidden_act", ("silu",))
    refuse_active(hf, "attention_bias", (True,))
    refuse_active(hf, "swiglu_alpha", (None, 1.702))
    width = positive(hf, "intermediate_size")
    topk = positive(hf, "num_experts_per_tok", "experts_per_token")
    sizes = attention_sizes({**hf, "moe_intermediate_size": width, "num_experts_per_tok": topk})
    experts = positive(hf, "num_local_experts")
    check_topk(topk, experts, "num_local_experts")
    return DecoderShape(
        **sizes,
        experts=experts,
        is_moe=(True,) * sizes["layers"],
        is_tied=required(hf, bool, "tie_word_embeddings"),
        has_qkv_bias=True,
    )


def _windows(hf: HFConfig, layers: int) -> dict[str, Any]:
    """Megatron settings: a window of w sees w - 1 tokens before its own."""
    kinds = hf.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_WINDOWED, _FULL) for kind in kinds):
        raise CheckpointError(
            f"config.json: layer_types is {kinds!r}; {_WINDOWED!r} or {_FULL!r} for each of {layers} layers is needed"
        )
    if _WINDOWED not in kinds:
        return {}
    window = positive(hf, "sliding_window")
    return {"window_size": [window - 1, 0], "window_attn_skip_freq": [int(kind == _WINDOWED) for kind in kinds]}


@families.register(
    "gpt_oss",
    NoArguments,
    architectures=("GptOssForCausalLM",),
    covers=("tied", "biases", "attention sinks", "sliding windows", "YaRN", "fused experts"),
    verified=EXACT,
)
class GptOss(DecoderFamily):
    """The family."""

    is_fused_on_disk: ClassVar[bool] = True

    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked."""
        return _read_shape(hf)

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings."""
        shape = _read_shape(hf)
        return (
            decoder_kwargs(shape, hf)
            | yarn_rope(hf)
            | _windows(hf, shape.layers)
            | {
                "moe_router_score_function": "softmax",
                "moe_router_pre_softmax": False,
                "add_bias_linear": True,
                "activation_func": "quick_gelu",
                "activation_func_clamp_value": required(hf, float, "swiglu_limit"),
                "glu_linear_offset": 1.0,
                "softmax_type": "learnable",
            }
        )

    def layer_rules(self, shape: DecoderShape, layer: int) -> Iterator[Rule]:
        """Attention as others have it, its output's bias and sinks; router and experts with biases."""
        yield from attention_rules(shape, layer)
        hf, megatron, h = f"model.layers.{layer}", f"decoder.layers.{layer}", shape.hidden
        attention, experts = f"{megatron}.self_attention", (shape.experts,)
        yield copy_rule(f"{attention}.linear_proj.bias", f"{hf}.self_attn.o_proj.bias", (h,), layer)
        sinks = f"{attention}.core_attention.softmax_offset"
        yield copy_rule(sinks, f"{hf}.self_attn.sinks", (shape.heads,), layer, axis=0)
        yield copy_rule(f"{megatron}.mlp.router.weight", f"{hf}.mlp.router.weight", (*experts, h), layer)
        yield copy_rule(f"{megatron}.mlp.router.bias", f"{hf}.mlp.router.bias", experts, layer)
        for e in range(shape.experts):
            yield from _expert_rules(shape, layer, e)

    def fused_slices(self, hf: HFConfig) -> dict[str, FusedSlice]:
        """[E, h, 2 f] and [E, 2 f], [E, f, h] and [E, h], in memory as on disk."""
        shape = _read_shape(hf)
        rows = dict(zip(_PARTS, (shape.hidden, 2 * shape.expert_width, shape.expert_width, shape.hidden), strict=True))
        return {
            _part(layer, e, part): FusedSlice(f"model.layers.{layer}.mlp.experts.{part}", e, 0, rows[part])
            for layer in range(shape.layers)
            for part in _PARTS
            for e in range(shape.experts)
        }


_PARTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _part(layer: int, expert: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}"


def _expert_rules(shape: DecoderShape, layer: int, expert: int) -> Iterator[Rule]:
    megatron = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
    h, f = shape.hidden, shape.expert_width
    parts: tuple[tuple[type[Rule], str, tuple[int, ...], int | None], ...] = (
        (AlternatingGateUp, "linear_fc1.weight", (h, 2 * f), 0),
        (AlternatingGateUp, "linear_fc1.bias", (2 * f,), 0),
        (Transposed, "linear_fc2.weight", (f, h), 1),
        (Copy, "linear_fc2.bias", (h,), None),
    )
    for name, (kind, parameter, size, axis) in zip(_PARTS, parts, strict=True):
        yield kind(
            megatron_name=f"{megatron}.{parameter}",
            hf_names=(_part(layer, expert, name),),
            hf_shapes=(size,),
            tensor_axis=axis,
            layer=layer,
            expert=expert,
        )
