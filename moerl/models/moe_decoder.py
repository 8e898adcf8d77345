"""What decoders with grouped-query attention share, with and without routed experts: shape, rules, settings.

A family reads config.json into a `DecoderShape`; the rules, the fused places and the common settings follow from it, so
that a tensor's name is written once for all families that use it.

Letters: L layers, h hidden, f width of an expert, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moerl.errors import CheckpointError
from moerl.models.family import ROTARY, WIDE_QK_NORM, FusedSlice, HFConfig
from moerl.models.hf_config import positive, refuse_active, required
from moerl.models.latent_attention import LatentAttention, latent_rules, read_latent
from moerl.models.rules import QKV, Copy, GateUp, Rule, Vocab

COMMON_FIELDS = frozenset(
    {
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_attention_heads",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    }
)
"""Of config.json, which every family of this kind reads or checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The fields of config.json, checked."""

    layers: int
    hidden: int
    heads: int
    groups: int
    """Key and value heads."""
    head_dim: int
    dense_width: int
    expert_width: int
    experts: int
    """Of a layer; 0 in a model that has none at all, and no `moe_*` settings then."""
    topk: int
    vocab: int
    is_moe: tuple[bool, ...]
    """[L]."""
    is_tied: bool
    latent: LatentAttention | None = None
    """Attention by latents, with as many key heads as heads; `head_dim` is that of its queries."""
    has_qk_norm: bool = False
    has_wide_qk_norm: bool = False
    """With `has_qk_norm`: each spans all heads."""
    has_qkv_bias: bool = False
    has_expert_bias: bool = False
    """The routers add a bias to their scores, for the choice alone."""
    expert_bias_name: str = "gate.e_score_correction_bias"
    """Where it lies, beside the experts."""
    shared_width: int = 0
    """Width of what runs for every token beside the routed experts; 0 for none."""
    shared_name: str = ""
    """Under which `mlp.<name>` holds it."""
    shared_gate: str = ""
    """Under which `mlp.<name>.weight` holds the gate on it; empty for none."""
    moe_name: str = "mlp"
    """What holds routers and experts on disk, in layers that have them; in memory transformers 5 calls it `mlp`."""
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's three matrices on disk."""


def attention_sizes(hf: HFConfig, *, has_experts: bool = True) -> dict[str, Any]:
    """Layers, widths, heads, experts and vocabulary; what nearly all families spell alike.

    Without `has_experts`, widths and numbers of them are 0.

    Raises:
        CheckpointError: a field is missing or no whole number from 1, or heads are no multiple of key and value heads.
    """
    heads, hidden = positive(hf, "num_attention_heads"), positive(hf, "hidden_size")
    sizes = {
        "layers": positive(hf, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "groups": positive(hf, "num_key_value_heads"),
        # transformers derives a missing head_dim in these families
        "head_dim": positive({"head_dim": hidden // heads} if hf.get("head_dim") is None else hf, "head_dim"),
        "dense_width": positive(hf, "intermediate_size"),
        "expert_width": positive(hf, "moe_intermediate_size") if has_experts else 0,
        "topk": positive(hf, "num_experts_per_tok") if has_experts else 0,
        "vocab": positive(hf, "vocab_size"),
    }
    if heads % sizes["groups"]:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {sizes['groups']}"
        )
    return sizes


def latent_sizes(hf: HFConfig) -> dict[str, Any]:
    """`attention_sizes` of a model with latent attention, and `latent` itself.

    Raises:
        CheckpointError: as both.
    """
    refuse_active(hf, "moe_layer_freq", (None, 1))
    latent = read_latent(hf)
    heads = positive(hf, "num_attention_heads")
    return attention_sizes({**hf, "num_key_value_heads": heads, "head_dim": latent.head_dim}) | {"latent": latent}


def check_topk(topk: int, experts: int, field: str) -> None:
    """Raises CheckpointError where a token would take more experts than `field` says there are."""
    if topk > experts:
        raise CheckpointError(f"config.json: num_experts_per_tok {topk} exceeds {field} {experts}")


def decoder_kwargs(shape: DecoderShape, hf: HFConfig) -> dict[str, Any]:
    """Megatron settings that follow from the shape; scores of the router and rotary embedding are the family's."""
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.dense_width,
        "qk_layernorm": shape.has_qk_norm,
        "normalization": "RMSNorm",
        "layernorm_epsilon": required(hf, float, "rms_norm_eps"),
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.has_qkv_bias,
        "rotary_interleaved": False,
        "moe_layer_freq": [int(is_moe) for is_moe in shape.is_moe],
        "vocab_size": shape.vocab,
        "max_sequence_length": positive(hf, "max_position_embeddings"),
        "share_embeddings_and_output_weights": shape.is_tied,
        "position_embedding_type": "rope",
    }
    if shape.experts:
        settings["num_moe_experts"] = shape.experts
        settings["moe_ffn_hidden_size"] = shape.expert_width
        settings["moe_router_topk"] = shape.topk
    if shape.has_wide_qk_norm:
        settings[WIDE_QK_NORM] = True
    if shape.has_expert_bias:
        settings["moe_router_enable_expert_bias"] = True
    if shape.shared_width:
        settings["moe_shared_expert_intermediate_size"] = shape.shared_width
        settings["moe_shared_expert_gate"] = bool(shape.shared_gate)
    return settings


class DecoderFamily(ABC):
    """What a family of such decoders need not write: rules, fused places and ignored names follow from its shape."""

    is_fused_on_disk: ClassVar[bool] = False

    @abstractmethod
    def shape(self, hf: HFConfig) -> DecoderShape:
        """From config.json, checked.

        Raises:
            CheckpointError: a field is missing, unknown, or has a value that is not supported; names it.
        """

    def weight_rules(self, hf: HFConfig, *, vocab_multiple: int = 1) -> list[Rule]:
        """Embedding, layers in order, final norm, and the output layer where it is not tied."""
        shape = self.shape(hf)
        rules: list[Rule] = [
            vocab_rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape, vocab_multiple)
        ]
        for layer in range(shape.layers):
            rules += self.layer_rules(shape, layer)
        rules.append(copy_rule("decoder.final_layernorm.weight", "model.norm.weight", (shape.hidden,)))
        if not shape.is_tied:
            rules.append(vocab_rule("output_layer.weight", "lm_head.weight", shape, vocab_multiple))
        return rules

    def layer_rules(self, shape: DecoderShape, layer: int) -> Iterator[Rule]:
        """Of one layer, in order."""
        yield from attention_rules(shape, layer)
        yield from _moe_rules(shape, layer) if shape.is_moe[layer] else _dense_rules(shape, layer)

    def fused_slices(self, hf: HFConfig) -> dict[str, FusedSlice]:
        """transformers 5 keeps [E, 2 f, h] (gate first) and [E, h, f] per MoE layer."""
        shape = self.shape(hf)
        slices: dict[str, FusedSlice] = {}
        width = shape.expert_width
        for layer, is_moe in enumerate(shape.is_moe):
            disk, memory = f"model.layers.{layer}.{shape.moe_name}", f"model.layers.{layer}.mlp"
            if is_moe and disk != memory:
                for name in ("gate.weight", *([shape.expert_bias_name] if shape.has_expert_bias else [])):
                    slices[f"{disk}.{name}"] = FusedSlice(f"{memory}.{name}", None)
            gate, up, down = (f"{part}.weight" for part in shape.expert_parts)
            fused = f"{memory}.experts"
            for e in range(shape.experts if is_moe else 0):
                expert = f"{disk}.experts.{e}"
                slices[f"{expert}.{gate}"] = FusedSlice(f"{fused}.gate_up_proj", e, 0, width)
                slices[f"{expert}.{up}"] = FusedSlice(f"{fused}.gate_up_proj", e, width, 2 * width)
                slices[f"{expert}.{down}"] = FusedSlice(f"{fused}.down_proj", e, 0, shape.hidden)
        return slices

    def repeated_names(self, hf: HFConfig) -> Mapping[str, str]:
        """The copy of the embedding that some tied checkpoints have."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.shape(hf).is_tied else {}

    def carried_names(self, hf: HFConfig) -> Mapping[str, tuple[str, ...]]:
        """Rotary tables of old files."""
        layers = "|".join(map(str, range(self.shape(hf).layers)))
        return {ROTARY: (rf"model\.layers\.({layers})\.self_attn\.rotary_emb\.inv_freq",)}


def prediction_layers(layers: int, count: int) -> tuple[str, ...]:
    """Regular expressions of `count` layers of multi-token prediction, numbered on from the `layers` of the decoder."""
    return tuple(rf"model\.layers\.{layers + i}\..*" for i in range(count))


def copy_rule(
    megatron: str, name: str, shape: tuple[int, ...], layer: int | None = None, axis: int | None = None
) -> Copy:
    """Of one tensor."""
    return Copy(megatron_name=megatron, hf_names=(name,), hf_shapes=(shape,), tensor_axis=axis, layer=layer)


def vocab_rule(megatron: str, name: str, shape: DecoderShape, multiple: int) -> Vocab:
    """Of the embedding or the output layer."""
    rows = (shape.vocab, shape.hidden)
    return Vocab(megatron_name=megatron, hf_names=(name,), hf_shapes=(rows,), tensor_axis=0, multiple=multiple)


def attention_rules(shape: DecoderShape, layer: int) -> Iterator[Rule]:
    """Of one layer: attention and both norms."""
    hf, megatron, h = f"model.layers.{layer}", f"decoder.layers.{layer}", shape.hidden
    yield copy_rule(f"{megatron}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (h,), layer)
    if shape.latent is not None:
        yield from latent_rules(shape.latent, h, shape.heads, layer)
    else:
        yield from _head_rules(shape, layer)
    yield copy_rule(f"{megatron}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", (h,), layer)


def _head_rules(shape: DecoderShape, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}", f"decoder.layers.{layer}"
    h, d = shape.hidden, shape.head_dim
    rows = (shape.heads * d, shape.groups * d, shape.groups * d)
    for kind in ("weight", "bias") if shape.has_qkv_bias else ("weight",):
        yield QKV(
            megatron_name=f"{megatron}.self_attention.linear_qkv.{kind}",
            hf_names=tuple(f"{hf}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            hf_shapes=tuple((n, h) if kind == "weight" else (n,) for n in rows),
            tensor_axis=0,
            layer=layer,
            num_heads=shape.heads,
            num_query_groups=shape.groups,
            head_dim=d,
        )
    for part, width in zip("qk", rows[:2], strict=True) if shape.has_qk_norm else ():
        norm = f"{megatron}.self_attention.{part}_layernorm.weight"
        yield copy_rule(norm, f"{hf}.self_attn.{part}_norm.weight", (width if shape.has_wide_qk_norm else d,), layer)
    proj = f"{megatron}.self_attention.linear_proj.weight"
    yield copy_rule(proj, f"{hf}.self_attn.o_proj.weight", (h, shape.heads * d), layer, axis=1)


def _moe_rules(shape: DecoderShape, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}.{shape.moe_name}", f"decoder.layers.{layer}.mlp"
    yield copy_rule(f"{megatron}.router.weight", f"{hf}.gate.weight", (shape.experts, shape.hidden), layer)
    if shape.has_expert_bias:
        yield Copy(
            megatron_name=f"{megatron}.router.expert_bias",
            hf_names=(f"{hf}.{shape.expert_bias_name}",),
            hf_shapes=((shape.experts,),),
            layer=layer,
            is_buffer=True,
        )
    if shape.shared_width:
        inner = f"{megatron}.shared_experts"
        yield from _mlp_rules(f"{hf}.{shape.shared_name}", inner, shape.hidden, shape.shared_width, layer)
    if shape.shared_gate:
        gate = f"{megatron}.shared_experts.gate_weight"
        yield copy_rule(gate, f"{hf}.{shape.shared_gate}.weight", (1, shape.hidden), layer)
    for e in range(shape.experts):
        expert = f"{megatron}.experts.local_experts.{e}"
        yield from _mlp_rules(
            f"{hf}.experts.{e}", expert, shape.hidden, shape.expert_width, layer, e, shape.expert_parts
        )


def _dense_rules(shape: DecoderShape, layer: int) -> Iterator[Rule]:
    hf, megatron = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    yield from _mlp_rules(hf, megatron, shape.hidden, shape.dense_width, layer)


def _mlp_rules(
    hf: str,
    megatron: str,
    hidden: int,
    width: int,
    layer: int,
    expert: int | None = None,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Rule]:
    gate, up, down = parts
    yield GateUp(
        megatron_name=f"{megatron}.linear_fc1.weight",
        hf_names=(f"{hf}.{gate}.weight", f"{hf}.{up}.weight"),
        hf_shapes=((width, hidden), (width, hidden)),
        tensor_axis=0,
        layer=layer,
        expert=expert,
    )
    yield Copy(
        megatron_name=f"{megatron}.linear_fc2.weight",
        hf_names=(f"{hf}.{down}.weight",),
        hf_shapes=((hidden, width),),
        tensor_axis=1,
        layer=layer,
        expert=expert,
    )
