"""Floating-point operations of a model on packed sequences, from its sizes and their lengths alone.

What the mathematics needs, as usual for the share of a device's peak: a product of [a, b] and [b, c] is 2 a b c, only
the experts that a token uses count, attention counts the pairs that a causal mask leaves, recomputation does not count.
Norms, rotations, softmaxes and the routers' top-k are left out: they are linear in the hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BACKWARD = 2
"""A backward has two products (to the input and to the weight) for each of the forward."""


@dataclass(frozen=True)
class Flops:
    """Of one forward."""

    layers: float
    """Projections, feed-forward parts, experts and routers."""
    attention: float
    """Scores and weighted values."""
    head: float
    """Logits."""

    @property
    def forward(self) -> float:
        """All of it."""
        return self.layers + self.attention + self.head

    @property
    def training(self) -> float:
        """Forward and backward."""
        return (1 + BACKWARD) * self.forward


def forward_flops(kwargs: Mapping[str, Any], lengths: Iterable[int], *, has_head: bool = True) -> Flops:
    """Of one forward of sequences of `lengths`, every token of which is predicted from.

    Args:
        kwargs: megatron's settings of the model, as a family gives them (`ModelFamily.transformer_kwargs`).
        lengths: tokens of each sequence; attention does not reach over their borders.
        has_head: False for a critic, whose head is one column.
    """
    lengths = list(lengths)
    tokens = sum(lengths)
    hidden, width = kwargs["hidden_size"], kwargs["kv_channels"]
    heads, groups = kwargs["num_attention_heads"], kwargs["num_query_groups"]
    pairs = sum(_pairs(kwargs, layer, lengths) for layer in range(kwargs["num_layers"]))
    per_token = sum(_layer(kwargs, bool(is_moe)) for is_moe in kwargs["moe_layer_freq"])
    layers = kwargs["num_layers"]
    value_width = kwargs.get("v_head_dim", width)
    latent = kwargs.get("multi_latent_attention")
    projections = layers * (_latent(kwargs) if latent else 2 * hidden * width * (2 * heads + 2 * groups))
    columns = kwargs["vocab_size"] if has_head else 1
    return Flops(
        layers=tokens * (per_token + projections),
        attention=2 * heads * (width + value_width) * pairs,
        head=tokens * 2 * hidden * columns,
    )


def _pairs(kwargs: Mapping[str, Any], layer: int, lengths: list[int]) -> float:
    """Of queries and the keys that they see in a layer."""
    window = kwargs.get("window_size")
    if not window or not kwargs["window_attn_skip_freq"][layer]:
        return sum(length * (length + 1) / 2 for length in lengths)
    seen = window[0] + 1
    return sum(min(length, seen) * (min(length, seen) + 1) / 2 + max(0, length - seen) * seen for length in lengths)


def _latent(kwargs: Mapping[str, Any]) -> float:
    """Of one token in the projections of a layer of latent attention."""
    hidden, heads, rank = kwargs["hidden_size"], kwargs["num_attention_heads"], kwargs["kv_lora_rank"]
    plain, rotated, value = (kwargs[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    query, query_rank = heads * (plain + rotated), kwargs["q_lora_rank"]
    weights = hidden * query if query_rank is None else query_rank * (hidden + query)
    weights += hidden * (rank + rotated) + rank * heads * (plain + value) + heads * value * hidden
    return 2 * weights


def _layer(kwargs: Mapping[str, Any], is_moe: bool) -> float:
    """Of one token in the feed-forward part of a layer."""
    matrices = 3 if kwargs["gated_linear_unit"] else 2
    hidden = kwargs["hidden_size"]
    if not is_moe:
        return 2 * matrices * hidden * kwargs["ffn_hidden_size"]
    shared = kwargs.get("moe_shared_expert_intermediate_size") or 0
    width = kwargs["moe_router_topk"] * kwargs["moe_ffn_hidden_size"] + shared
    gate = 2 * hidden if kwargs.get("moe_shared_expert_gate") else 0
    return 2 * matrices * hidden * width + 2 * hidden * kwargs["num_moe_experts"] + gate


PEAK_FLOPS: Mapping[str, float] = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
}
"""Dense bf16 products a second of GPUs by a part of their name, as their makers' data sheets say."""


def peak_flops(device_name: str, params: str) -> float | None:
    """Peak of a device by its name, in the format of `precision.params`; None where it is not known (fp32, a CPU)."""
    if params != "bf16":
        return None
    found = [name for name in PEAK_FLOPS if _is_part(name, device_name)]
    return PEAK_FLOPS[max(found, key=len)] if found else None


def _is_part(name: str, device_name: str) -> bool:
    """Whether the words of `name` stand in `device_name`; H20 is no part of H200."""
    words = device_name.replace("-", " ").split()
    return all(word in words for word in name.split())
