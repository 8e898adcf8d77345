"""Qwen3-MoE (30B-A3B, 235B-A22B): grouped-query attention with per-head q/k norm, softmax router, no shared expert.

Letters: L layers, h hidden, f width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moerl.errors import CheckpointError
from moerl.models.family import FusedSlice, HFConfig, NoArguments, families
from moerl.models.hf_config import plain_rope_theta, refuse_active, refuse_unknown, required
from moerl.models.rules import QKV, Copy, GateUp, Rule, Vocab

_KNOWN = frozenset(
    {
        "attention_bias",
        "decoder_sparse_step",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The fields of config.json, checked."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    dense_width: int
    expert_width: int
    experts: int
    topk: int
    vocab: int
    is_moe: tuple[bool, ...]
    """[L]."""
    is_tied: bool


def _read_sizes(hf: HFConfig) -> _Sizes:
    refuse_unknown(hf, _KNOWN)
    refuse_active(hf, "attention_bias")
    refuse_active(hf, "use_sliding_window")
    refuse_active(hf, "hidden_act", ("silu",))
    odd_types = sorted(set(hf.get("layer_types") or []) - {"full_attention"})
    if odd_types:
        raise CheckpointError(f"config.json: layer_types has {odd_types}, not supported (allowed: 'full_attention')")
    heads = required(hf, int, "num_attention_heads")
    hidden = required(hf, int, "hidden_size")
    layers = required(hf, int, "num_hidden_layers")
    # transformers derives a missing head_dim in this family; the released configs always have it.
    head_dim = hidden // heads if hf.get("head_dim") is None else required(hf, int, "head_dim")
    sizes = _Sizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=required(hf, int, "num_key_value_heads"),
        head_dim=head_dim,
        dense_width=required(hf, int, "intermediate_size"),
        expert_width=required(hf, int, "moe_intermediate_size"),
        experts=required(hf, int, "num_experts", "num_local_experts"),
        topk=required(hf, int, "num_experts_per_tok"),
        vocab=required(hf, int, "vocab_size"),
        is_moe=_moe_layers(hf, layers),
        is_tied=required(hf, bool, "tie_word_embeddings"),
    )
    if sizes.heads % sizes.groups:
        raise CheckpointError(
            f"config.json: num_attention_heads {sizes.heads} is not a multiple of num_key_value_heads {sizes.groups}"
        )
    if sizes.topk > sizes.experts:
        raise CheckpointError(f"config.json: num_experts_per_tok {sizes.topk} exceeds num_experts {sizes.experts}")
    return sizes


def _moe_layers(hf: HFConfig, layers: int) -> tuple[bool, ...]:
    """Layer i is MoE when the step divides i + 1 and i is not listed: another phase than Megatron's integer form."""
    step = required(hf, int, "decoder_sparse_step")
    if step < 1:
        raise CheckpointError(f"config.json: decoder_sparse_step is {step}; it must be at least 1")
    dense = set(hf.get("mlp_only_layers") or [])
    outside = sorted(dense - set(range(layers)))
    if outside:
        raise CheckpointError(f"config.json: mlp_only_layers names {outside}, but there are only {layers} layers")
    return tuple((i + 1) % step == 0 and i not in dense for i in range(layers))


@families.register("qwen3_moe", NoArguments, architectures=("Qwen3MoeForCausalLM",))
class Qwen3Moe:
    """The family."""

    def transformer_kwargs(self, hf: HFConfig) -> dict[str, Any]:
        """Megatron settings; renormalised top-k weights (`norm_topk_prob`) are a softmax over the chosen logits."""
        sizes = _read_sizes(hf)
        return {
            "num_layers": sizes.layers,
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.heads,
            "num_query_groups": sizes.groups,
            "kv_channels": sizes.head_dim,
            "ffn_hidden_size": sizes.dense_width,
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "layernorm_epsilon": required(hf, float, "rms_norm_eps"),
            "activation_func": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "rotary_interleaved": False,
            "num_moe_experts": sizes.experts,
            "moe_ffn_hidden_size": sizes.expert_width,
            "moe_layer_freq": [int(is_moe) for is_moe in sizes.is_moe],
            "moe_router_topk": sizes.topk,
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not required(hf, bool, "norm_topk_prob"),
            "vocab_size": sizes.vocab,
            "max_sequence_length": required(hf, int, "max_position_embeddings"),
            "share_embeddings_and_output_weights": sizes.is_tied,
            "position_embedding_type": "rope",
            "rotary_base": plain_rope_theta(hf),
            "rotary_percent": 1.0,
        }

    def weight_rules(self, hf: HFConfig, *, vocab_multiple: int = 1) -> list[Rule]:
        """Embedding, layers in order, final norm, output layer (absent when tied)."""
        sizes = _read_sizes(hf)
        rules: list[Rule] = [
            _vocab_rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", sizes, vocab_multiple)
        ]
        for layer in range(sizes.layers):
            rules.extend(_attention_rules(sizes, layer))
            rules.extend(_moe_rules(sizes, layer) if sizes.is_moe[layer] else _dense_rules(sizes, layer))
        rules.append(_copy("decoder.final_layernorm.weight", "model.norm.weight", (sizes.hidden,)))
        if not sizes.is_tied:
            rules.append(_vocab_rule("output_layer.weight", "lm_head.weight", sizes, vocab_multiple))
        return rules

    def fused_slices(self, hf: HFConfig) -> dict[str, FusedSlice]:
        """`gate_up_proj` [E, 2 f, h] (gate rows first) and `down_proj` [E, h, f] of transformers 5."""
        sizes = _read_sizes(hf)
        slices = {}
        for layer in (i for i in range(sizes.layers) if sizes.is_moe[i]):
            experts = f"model.layers.{layer}.mlp.experts"
            for e in range(sizes.experts):
                width = sizes.expert_width
                slices[f"{experts}.{e}.gate_proj.weight"] = FusedSlice(f"{experts}.gate_up_proj", e, 0, width)
                slices[f"{experts}.{e}.up_proj.weight"] = FusedSlice(f"{experts}.gate_up_proj", e, width, 2 * width)
                slices[f"{experts}.{e}.down_proj.weight"] = FusedSlice(f"{experts}.down_proj", e, 0, sizes.hidden)
        return slices

    def ignored_names(self, hf: HFConfig) -> tuple[str, ...]:
        """Rotary tables of old files, and the copy of the embedding that some tied checkpoints carry."""
        rotary = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
        return (rotary, r"lm_head\.weight") if _read_sizes(hf).is_tied else (rotary,)


def _copy(megatron: str, name: str, shape: tuple[int, ...], layer: int | None = None, axis: int | None = None) -> Copy:
    return Copy(megatron_name=megatron, hf_names=(name,), hf_shapes=(shape,), tensor_axis=axis, layer=layer)


def _vocab_rule(megatron: str, name: str, sizes: _Sizes, multiple: int) -> Vocab:
    shape = (sizes.vocab, sizes.hidden)
    return Vocab(megatron_name=megatron, hf_names=(name,), hf_shapes=(shape,), tensor_axis=0, multiple=multiple)


def _attention_rules(sizes: _Sizes, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}", f"decoder.layers.{layer}"
    h, d = sizes.hidden, sizes.head_dim
    yield _copy(f"{megatron}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (h,), layer)
    yield QKV(
        megatron_name=f"{megatron}.self_attention.linear_qkv.weight",
        hf_names=tuple(f"{hf}.self_attn.{part}_proj.weight" for part in "qkv"),
        hf_shapes=((sizes.heads * d, h), (sizes.groups * d, h), (sizes.groups * d, h)),
        tensor_axis=0,
        layer=layer,
        num_heads=sizes.heads,
        num_query_groups=sizes.groups,
        head_dim=d,
    )
    for part in "qk":
        norm = f"{megatron}.self_attention.{part}_layernorm.weight"
        yield _copy(norm, f"{hf}.self_attn.{part}_norm.weight", (d,), layer)
    proj = f"{megatron}.self_attention.linear_proj.weight"
    yield _copy(proj, f"{hf}.self_attn.o_proj.weight", (h, sizes.heads * d), layer, axis=1)
    yield _copy(f"{megatron}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", (h,), layer)


def _moe_rules(sizes: _Sizes, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    yield _copy(f"{megatron}.router.weight", f"{hf}.gate.weight", (sizes.experts, sizes.hidden), layer)
    for e in range(sizes.experts):
        expert = f"{megatron}.experts.local_experts.{e}"
        yield from _mlp_rules(f"{hf}.experts.{e}", expert, sizes.hidden, sizes.expert_width, layer, e)


def _dense_rules(sizes: _Sizes, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    yield from _mlp_rules(hf, megatron, sizes.hidden, sizes.dense_width, layer, None)


def _mlp_rules(hf: str, megatron: str, hidden: int, width: int, layer: int, expert: int | None) -> Iterator[Rule]:
    yield GateUp(
        megatron_name=f"{megatron}.linear_fc1.weight",
        hf_names=(f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"),
        hf_shapes=((width, hidden), (width, hidden)),
        tensor_axis=0,
        layer=layer,
        expert=expert,
    )
    yield Copy(
        megatron_name=f"{megatron}.linear_fc2.weight",
        hf_names=(f"{hf}.down_proj.weight",),
        hf_shapes=((hidden, width),),
        tensor_axis=1,
        layer=layer,
        expert=expert,
    )
