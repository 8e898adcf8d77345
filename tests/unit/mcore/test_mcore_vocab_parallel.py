"""Chunked linear log-probabilities against plain torch, values and gradients."""

from __future__ import annotations

import pytest
import torch

from moerl.mcore.vocab_parallel import HeadSettings, VocabShard, linear_logprobs
from moerl.types import PackedSupport


def plain(hidden, weight, targets, temperature, allowed=None):
    logits = hidden @ weight.t() / temperature[:, None]
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    logq = torch.log_softmax(logits, -1)
    entropy = -(logq.exp() * (logq if allowed is None else logq.masked_fill(~allowed, 0.0))).sum(-1)
    return logq.gather(-1, targets[:, None])[:, 0], entropy


def inputs(rows=37, width=16, vocab=29, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = (0.5 * torch.randn(rows, width, generator=generator, dtype=dtype)).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5
    return hidden, weight, targets, temperature


def grads(values, hidden, weight):
    logprobs, entropy = values
    scale = torch.linspace(-1, 1, len(logprobs))
    return torch.autograd.grad((scale * logprobs).sum() + (scale.flip(0) * entropy).sum(), (hidden, weight))


@pytest.mark.parametrize("chunk_elements", [1, 29 * 5, 1 << 20])
def test_values_and_gradients_equal_plain_torch(chunk_elements):
    hidden, weight, targets, temperature = inputs()
    got = linear_logprobs(hidden, weight, targets, temperature, head=HeadSettings(tile_elements=chunk_elements))
    expected = plain(hidden, weight, targets, temperature)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() < 2e-6
    for ours, theirs in zip(grads(got, hidden, weight), grads(expected, hidden, weight), strict=True):
        assert (ours - theirs).abs().max() < 2e-5


def test_support_restricts_the_distribution():
    hidden, weight, targets, temperature = inputs()
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(37, 29, generator=generator) < 0.3
    allowed[torch.arange(37), targets] = True
    allowed[::4] = True
    counts = torch.where(torch.arange(37) % 4 == 0, 0, allowed.sum(1))
    ids = torch.cat([torch.nonzero(allowed[i])[:, 0] for i in range(37) if i % 4])
    support = PackedSupport(ids, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    got = linear_logprobs(
        hidden, weight, targets, temperature, support=support, head=HeadSettings(tile_elements=29 * 4)
    )
    expected = plain(hidden, weight, targets, temperature, allowed)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() < 2e-6
    for ours, theirs in zip(grads(got, hidden, weight), grads(expected, hidden, weight), strict=True):
        assert (ours - theirs).abs().max() < 2e-5


def test_padded_rows_of_the_vocabulary_have_no_probability():
    hidden, weight, targets, temperature = inputs()
    padded = torch.cat([weight, torch.ones(6, 16, dtype=weight.dtype)])
    got = linear_logprobs(hidden, padded, targets, temperature, shard=VocabShard(0, 29))
    expected = linear_logprobs(hidden, weight, targets, temperature)
    assert (got[0] - expected[0]).abs().max() < 1e-5
    assert torch.autograd.grad(got[0].sum(), padded)[0][29:].abs().max() == 0


def test_extreme_logits_stay_finite():
    hidden, weight, targets, temperature = inputs()
    with torch.no_grad():
        hidden *= 1e4
    got = linear_logprobs(hidden, weight, targets, temperature)
    assert torch.isfinite(got[0]).all()
    assert torch.isfinite(got[1]).all()
    assert all(torch.isfinite(g).all() for g in grads(got, hidden, weight))


def test_bfloat16_hidden_states_reduce_in_float32():
    hidden, weight, targets, temperature = inputs(vocab=501, dtype=torch.bfloat16)
    got, _ = linear_logprobs(hidden, weight, targets, temperature)
    assert got.dtype == torch.float32
    exact, _ = plain(hidden.double(), weight.double(), targets, temperature)
    naive, _ = plain(hidden, weight, targets, temperature.bfloat16())
    assert (got - exact).abs().max() < 0.5 * (naive - exact).abs().max()
