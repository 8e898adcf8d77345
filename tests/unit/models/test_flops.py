"""Operations of a model: closed forms, and torch's own count of what the learner computes."""

from __future__ import annotations

import pytest

from moerl.models.flops import forward_flops, peak_flops

KWARGS = {
    "num_layers": 3,
    "hidden_size": 10,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 5,
    "ffn_hidden_size": 7,
    "moe_ffn_hidden_size": 6,
    "moe_layer_freq": [0, 1, 1],
    "num_moe_experts": 8,
    "moe_router_topk": 3,
    "gated_linear_unit": True,
    "vocab_size": 50,
}


def test_closed_form():
    """Worked by hand for two sequences of 2 and 3 tokens."""
    flops = forward_flops(KWARGS, [2, 3])
    qkv_and_out = 2 * 10 * 5 * (4 + 2 + 2) + 2 * 20 * 10
    dense = 2 * 3 * 10 * 7
    moe = 2 * 3 * 10 * 6 * 3 + 2 * 10 * 8
    assert flops.layers == 5 * (3 * qkv_and_out + dense + 2 * moe)
    assert flops.attention == 3 * (3 + 6) * 4 * 5 * 2 * 2
    assert flops.head == 5 * 2 * 10 * 50
    assert flops.forward == flops.layers + flops.attention + flops.head
    assert flops.training == 3 * flops.forward


def test_packing_two_sequences_adds_no_attention_between_them():
    apart = [forward_flops(KWARGS, [length]).attention for length in (100, 200)]
    assert forward_flops(KWARGS, [100, 200]).attention == sum(apart)
    assert forward_flops(KWARGS, [300]).attention > 1.7 * sum(apart)


def test_more_experts_cost_their_router_alone_and_a_shared_one_its_width():
    base, many = forward_flops(KWARGS, [4]), forward_flops({**KWARGS, "num_moe_experts": 16}, [4])
    assert many.layers - base.layers == 2 * 4 * 2 * 10 * 8
    shared = forward_flops({**KWARGS, "moe_shared_expert_intermediate_size": 6}, [4])
    assert shared.layers - base.layers == 2 * 4 * 2 * 3 * 10 * 6
    assert forward_flops(KWARGS, [4], has_head=False).head == 4 * 2 * 10


@pytest.mark.parametrize(
    ("name", "params", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("some other card", "bf16", None),
    ],
)
def test_peaks_are_known_by_name(name, params, peak):
    assert peak_flops(name, params) == peak


def test_a_window_bounds_the_keys_of_its_layers():
    """By hand: of 4 tokens with a window of 2, 1 + 2 + 2 + 2 pairs in two layers, 10 in the third."""
    kwargs = {**KWARGS, "window_size": [1, 0], "window_attn_skip_freq": [1, 0, 1]}
    assert forward_flops(kwargs, [4]).attention == (7 + 10 + 7) * 4 * 5 * 2 * 2
    assert forward_flops(kwargs, [1]) == forward_flops(KWARGS, [1])
