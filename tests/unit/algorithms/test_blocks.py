"""An objective cut into blocks is the objective: loss, gradient and metrics of every preset, whatever the cut."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moerl.algorithms import blocks
from moerl.algorithms.presets import PRESETS
from moerl.metrics import to_floats

NAMES = [name for name in PRESETS if name != "group_dpo"]


@pytest.mark.parametrize("block", [1, 3, 5, 9])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_change_nothing(batch_v, monkeypatch, name, block):
    values = PRESETS[name].values
    objective = batch_v.objective(values)
    if not set(objective.needs) <= set(batch_v.inputs(batch_v.now, aggregation={"name": "token_sum"}).optional):
        pytest.skip(f"batch V has no {', '.join(objective.needs)}")
    whole = batch_v.run(values)
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", block)
    cut = batch_v.run(values)
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-15)
    assert cut[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-12)


def test_the_whole_is_cut_at_sequences_only():
    ids = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3, 3, 4])
    assert list(cuts(ids, 4)) == [(0, 4), (4, 9), (9, 10)]
    assert list(cuts(ids, 1)) == [(0, 3), (3, 4), (4, 9), (9, 10)]
    assert list(cuts(ids, 100)) == [(0, 10)]


def cuts(ids, size):
    before, blocks.BLOCK_TOKENS = blocks.BLOCK_TOKENS, size
    try:
        yield from blocks._bounds(ids)
    finally:
        blocks.BLOCK_TOKENS = before


def test_masks_and_garbage_survive_the_cut(batch_v, monkeypatch):
    values = {**PRESETS["gspo"].values, "correction": {"name": "tis"}}
    rollout = batch_v.rollout.clone()
    rollout[[2, 7]] = math.nan
    whole = batch_v.run(values, rollout_logprobs=rollout)
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 3)
    cut = batch_v.run(values, rollout_logprobs=rollout)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-15)
    assert cut[2]["mm/invalid_logprobs"] == whole[2]["mm/invalid_logprobs"] == 2


def test_the_gradient_goes_on_to_what_made_the_inputs(batch_v, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 3)
    objective = batch_v.objective({**PRESETS["cispo"].values, "entropy": {"place": "loss", "coefficient": 0.1}})
    scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    base = batch_v.inputs(batch_v.now * scale, aggregation={"name": "token_mean"})
    entropy = torch.ones(10, dtype=torch.float64) * scale
    loss, metrics = objective(type(base)(**{**vars(base), "optional": {**base.optional, "entropy": entropy}}))
    (3 * loss).backward()
    assert to_floats(metrics)["pg/entropy"] == 1
    with torch.no_grad():
        ratio = (batch_v.now - batch_v.old).exp().clamp(max=5)
        wanted = 3 * ((-ratio * base.advantages * base.weights.policy * batch_v.now).sum() - 0.1)
    torch.testing.assert_close(scale.grad, wanted)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("name", ["gspo", "grpo", "sapo"])
def test_without_gradient(batch_v, monkeypatch, name):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 3)
    objective = batch_v.objective(PRESETS[name].values)
    with torch.no_grad():
        loss, _ = objective(batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"}))
    assert not loss.requires_grad
    assert loss.isfinite()


@pytest.mark.parametrize("level", ["seq_geo", "seq_prod"])
@pytest.mark.parametrize(
    "trust", [{"name": "clip"}, {"name": "clip", "dual_c": 3.0}, {"name": "soft_gate"}, {"name": "none"}]
)
def test_once_a_sequence_is_the_same_as_once_a_token(batch_v, level, trust):
    values = {"level": level, "trust": trust, "kl": {"place": "none"}}
    fast = batch_v.objective(values)
    assert fast.policy.is_elementwise
    slow = dataclasses.replace(fast, policy=dataclasses.replace(fast.policy, is_elementwise=False))
    found = []
    for objective in (fast, slow):
        leaf = batch_v.now.clone().requires_grad_()
        loss, metrics = objective(batch_v.inputs(leaf, aggregation={"name": "token_mean"}))
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0], to_floats(metrics)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=1e-15)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-9, abs=1e-12)


def test_sequences_without_tokens_have_no_part(batch_v):
    objective = batch_v.objective(PRESETS["gspo"].values)
    x = batch_v.inputs(batch_v.now.clone().requires_grad_(), aggregation={"name": "token_mean"})
    gaps = dataclasses.replace(x, seq_ids=x.seq_ids * 2 + 1, num_seqs=9)
    (plain, seen), (with_gaps, again) = objective(x), objective(gaps)
    torch.testing.assert_close(with_gaps, plain, rtol=1e-12, atol=0)
    assert to_floats(seen) == pytest.approx(to_floats(again))
