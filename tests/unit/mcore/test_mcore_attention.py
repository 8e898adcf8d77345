"""Attention over a pack is that of its sequences one by one; sequences of like length are attended to together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moerl.mcore.local_spec import PackedAttention, packed_layout
from moerl.mcore.rows import RowCut, plan_rows

LENGTHS = {
    "equal": [7, 7, 7],
    "short": [5, 1, 9, 30, 2],
    "spread": [300, 12, 290, 130, 1, 129, 200, 40],
    "one": [150],
}
GROUPS = {"equal": None, "short": 1, "spread": 4, "one": None}
"""None: nothing to pad."""


class Settings:
    """What the module reads of megatron's configuration."""

    kv_channels = 6
    window_size = None
    window_attn_skip_freq = None
    softmax_type = "vanilla"
    attention_dropout = 0.0


class Alone:
    """Process groups of one process."""

    cp = None


def layout_of(lengths):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return packed_layout(plan_rows(bounds, RowCut(0, 1, 1)), use_te=False)


def attention(monkeypatch) -> PackedAttention:
    monkeypatch.setattr(
        "moerl.mcore.local_spec.MegatronModule.__init__", lambda self, config: torch.nn.Module.__init__(self)
    )
    module = PackedAttention(Settings(), 1, pg_collection=Alone())  # pyright: ignore[reportArgumentType]
    module.config = Settings()  # pyright: ignore[reportAttributeAccessIssue]
    return module


@pytest.mark.parametrize("name", LENGTHS)
def test_values_and_gradients_are_those_of_sequence_by_sequence(monkeypatch, name):
    lengths = LENGTHS[name]
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(lengths), heads, 6) for heads in (4, 2, 2)]
    packed = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    scale = torch.randn(sum(lengths), 24, generator=generator, dtype=torch.float64)
    out = attention(monkeypatch)(*packed, packed_seq_params=layout_of(lengths))
    apart = []
    for query, key, value in zip(*(tensor.split(lengths) for tensor in packed), strict=True):
        one = [x.transpose(0, 1)[None] for x in (query, key, value)]
        seen = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        apart.append(seen[0].transpose(0, 1).flatten(1))
    expected = torch.cat(apart)
    assert (out - expected).abs().max() < 1e-12
    ours = torch.autograd.grad((out * scale).sum(), packed)
    theirs = torch.autograd.grad((expected * scale).sum(), packed)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("name", LENGTHS)
def test_a_group_pads_little_and_every_row_is_in_one(name):
    layout = layout_of(LENGTHS[name])
    if GROUPS[name] is None:
        assert layout.groups is None
        return
    assert layout.groups is not None
    assert len(layout.groups) == GROUPS[name]
    assert sum(count for _, count in layout.groups) == len(LENGTHS[name])
    assert layout.collect is not None
    places = torch.cat([places for places, _ in layout.groups])
    assert torch.equal(places[layout.collect], torch.arange(sum(LENGTHS[name])))
    pairs = sum(count * (len(places) // count) ** 2 for places, count in layout.groups)
    exact = sum(length**2 for length in LENGTHS[name])
    assert pairs <= exact / 0.65 + 128**2 * len(LENGTHS[name])


def test_a_float32_models_attention_is_computed_in_float64(monkeypatch):
    """Scores of tens, as norms with large weights give them: float32 throughout would lose digits of them."""
    generator = torch.Generator().manual_seed(5)
    lengths = [40, 40]
    query, key, value = (torch.randn(sum(lengths), heads, 6, generator=generator) for heads in (4, 2, 2))
    module, layout = attention(monkeypatch), layout_of(lengths)
    packed = [x.requires_grad_() for x in (query.double() * 4, key.double() * 4, value)]
    out = module(*packed, packed_seq_params=layout)
    exact = module(*(x.detach().double() for x in packed), packed_seq_params=layout)
    plain = F.scaled_dot_product_attention(
        *(x.detach().float().view(2, 40, -1, 6).transpose(1, 2) for x in packed), is_causal=True, enable_gqa=True
    )
    off = (plain.transpose(1, 2).flatten(0, 1).flatten(1) - exact).abs().max()
    assert out.dtype == torch.float32
    assert torch.equal(out, exact.float())
    assert off > 10 * (out - exact).abs().max()
    grads = torch.autograd.grad(out.sin().sum(), packed)
    assert [grad.dtype for grad in grads] == [torch.float64, torch.float64, torch.float32]
    wide = [x.detach().double().requires_grad_() for x in packed]
    wanted = torch.autograd.grad(module(*wide, packed_seq_params=layout).sin().sum(), wide)
    for grad, true in zip(grads, wanted, strict=True):
        assert (grad - true).abs().max() <= 2e-5 * true.abs().max()
