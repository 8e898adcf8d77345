"""The ways that leave work out, where nothing is masked or for long batches, give what the plain way gives.

Batch V carries fields that few methods read, and some of them rule the short ways out. Here a method gets what it asks
for and nothing else, as the learner fills it.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moerl.algorithms import blocks
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.sanitise import sanitise
from moerl.metrics import to_floats

SEQUENCE = {"level": "seq_geo", "kl": {"place": "none"}}
TOKEN = {"kl": {"place": "none"}}
METHODS = {name: preset.values for name, preset in PRESETS.items()} | {
    "clip of a product": {**SEQUENCE, "level": "seq_prod", "trust": {"name": "clip", "lo": 0.2, "hi": 0.2}},
    "no bound on a mean": {**SEQUENCE, "trust": {"name": "none"}},
    "two-sided sequence clip": {**SEQUENCE, "trust": {"name": "clip", "lo": 0.01, "hi": 0.01, "dual_c": 1.05}},
    "score of a product": {**SEQUENCE, "level": "seq_prod", "form": "score", "trust": {"name": "none"}},
    "weights of the engine": {**TOKEN, "trust": {"name": "none"}, "correction": {"name": "tis", "cap": 1.1}},
    "weights of a sequence": {**SEQUENCE, "trust": {"name": "none"}, "correction": {"name": "tis", "level": "seq"}},
    "rejection of nothing": {**TOKEN, "correction": {"name": "mis", "min": 0.0, "max": 1e9}},
    "likely tokens count more": {**SEQUENCE, "token_weight": {"name": "prob_reweight", "alpha": 0.5}},
    "values of the sequence, gradient of the token": {**SEQUENCE, "level": "seq_geo_token", "trust": {"name": "none"}},
}


def lean(batch_v, objective, leaf, aggregation):
    """Batch V with what `objective` reads."""
    x = batch_v.inputs(leaf, aggregation=aggregation)
    return dataclasses.replace(x, optional={name: x.optional[name] for name in objective.needs})


def evaluate(batch_v, objective, values):
    leaf = batch_v.now.clone().requires_grad_()
    x = lean(batch_v, objective, leaf, batch_v.resolved(values.get("aggregation", {"name": "token_mean"})))
    loss, metrics = objective(x)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], to_floats(metrics)


def plain(batch_v, objective, values):
    """The same with a masked token behind the last, which rules every short way out."""
    leaf = batch_v.now.clone().requires_grad_()
    x = lean(batch_v, objective, leaf, batch_v.resolved(values.get("aggregation", {"name": "token_mean"})))

    def longer(tokens):
        return torch.cat([tokens, tokens[-1:]])

    weights = type(x.weights).shared(longer(x.weights.policy))
    tokens = {name: longer(getattr(x, name)) for name in ("logprobs", "rollout_logprobs", "advantages", "seq_ids")}
    optional = {name: values if name == "group_ids" else longer(values) for name, values in x.optional.items()}
    mask = torch.arange(len(x.mask) + 1) < len(x.mask)
    loss, metrics = objective(dataclasses.replace(x, **tokens, mask=mask, weights=weights, optional=optional))
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], to_floats(metrics)


def check(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-12, atol=1e-15)
    assert found[2] == pytest.approx(wanted[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_short_ways_change_nothing(batch_v, monkeypatch, name):
    values = METHODS[name]
    objective = batch_v.objective(values)
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_sum"})
    if not set(objective.needs) <= set(x.optional):
        pytest.skip(f"batch V has no {', '.join(sorted(set(objective.needs) - set(x.optional)))}")
    wanted = plain(batch_v, objective, values)
    check(evaluate(batch_v, objective, values), wanted)
    if name != "group_dpo":
        for block in (1, 5, 9):
            monkeypatch.setattr(blocks, "BLOCK_TOKENS", block)
            check(evaluate(batch_v, objective, values), wanted)


@pytest.mark.parametrize("name", ["gspo", "grpo", "cispo", "no bound on a mean", "rejection of nothing"])
def test_the_short_way_is_the_one_taken(batch_v, name):
    objective = batch_v.objective(METHODS[name])
    x = lean(batch_v, objective, batch_v.now.clone().requires_grad_(), {"name": "token_mean"})
    assert sanitise(x, reads_rollout_logprobs=objective.reads_rollout_logprobs).is_full
    masked = dataclasses.replace(x, mask=torch.arange(10) > 0)
    assert not sanitise(masked, reads_rollout_logprobs=objective.reads_rollout_logprobs).is_full


def test_only_what_is_longer_than_a_block_is_cut(batch_v, monkeypatch):
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 10)
    assert not blocks.is_worth_cutting(x)
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 9)
    assert blocks.is_worth_cutting(x)


@pytest.mark.parametrize("trust", [{"name": "none"}, {"name": "clip", "lo": 0.2, "hi": 0.2}])
def test_empty_sequences_at_either_end_have_no_part(batch_v, trust):
    objective = batch_v.objective({**SEQUENCE, "trust": trust})
    x = lean(batch_v, objective, batch_v.now.clone().requires_grad_(), {"name": "token_mean"})
    padded = dataclasses.replace(x, seq_ids=x.seq_ids + 1, num_seqs=6)
    assert objective(padded)[0].item() == pytest.approx(objective(x)[0].item(), rel=1e-12)
    assert to_floats(objective(padded)[1]) == pytest.approx(to_floats(objective(x)[1]), rel=1e-12)


def test_nothing_is_invalid_in_a_batch_that_is_used_as_it_is(batch_v):
    objective = batch_v.objective({**TOKEN, "correction": {"name": "tis"}})
    x = lean(batch_v, objective, batch_v.now.clone().requires_grad_(), {"name": "token_mean"})
    metrics = to_floats(objective(x)[1])
    assert metrics["pg/invalid_logprobs"] == 0
    assert metrics["mm/invalid_logprobs"] == 0


@pytest.mark.parametrize("trust", [{"name": "none"}, {"name": "clip", "lo": 0.2, "hi": 0.2}])
@pytest.mark.parametrize("level", ["token", "seq_prod"])
def test_beyond_the_limit_of_the_log_ratio_the_gradient_is_0_and_the_tokens_are_counted(
    batch_v, monkeypatch, level, trust
):
    objective = batch_v.objective({**TOKEN, "level": level, "trust": trust})
    old = batch_v.now.clone()
    old[4] -= 21.0  # the second sequence, of two tokens; its advantage is negative, so that no clip binds
    found = []
    for block in (100, 3):
        monkeypatch.setattr(blocks, "BLOCK_TOKENS", block)
        leaf = batch_v.now.clone().requires_grad_()
        x = lean(batch_v, objective, leaf, {"name": "token_mean"})
        loss, metrics = objective(dataclasses.replace(x, optional={"old_logprobs": old}))
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0], to_floats(metrics)))
    for loss, gradient, metrics in found:
        assert loss.isfinite()
        assert gradient[4 : 5 if level == "token" else 6].abs().max() == 0
        assert gradient[[0, 1, 2, 3, 6, 7, 8, 9]].abs().min() > 0
        assert metrics["pg/clamped"] == pytest.approx(0.1 if level == "token" else 0.2)
    check(found[1], found[0])


@pytest.mark.parametrize("name", ["cispo", "gspo", "dapo"])
def test_a_field_that_is_only_reported_takes_no_part_in_the_gradient(batch_v, monkeypatch, name):
    objective = batch_v.objective(METHODS[name])
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 3)
    leaf = batch_v.now.clone().requires_grad_()
    x = lean(batch_v, objective, leaf, {"name": "token_mean"})
    entropy = torch.linspace(0.5, 1.5, 10, dtype=torch.float64, requires_grad=True)
    loss, metrics = objective(dataclasses.replace(x, optional={**x.optional, "entropy": entropy}))
    by_logprobs, by_entropy = torch.autograd.grad(loss, (leaf, entropy), allow_unused=True, retain_graph=True)
    assert to_floats(metrics)["pg/entropy"] == pytest.approx(1.0)
    assert by_entropy is None or by_entropy.abs().max() == 0
    torch.testing.assert_close(by_logprobs, torch.autograd.grad(objective(x)[0], leaf)[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("at", [0, 9])
def test_an_infinite_logprob_is_no_matter_of_the_other_blocks(batch_v, monkeypatch, at):
    objective = batch_v.objective({**SEQUENCE, "trust": {"name": "clip"}})
    now = batch_v.now.clone()
    now[at] = -math.inf
    found = []
    for block in (100, 3):
        monkeypatch.setattr(blocks, "BLOCK_TOKENS", block)
        leaf = now.clone().requires_grad_()
        loss, metrics = objective(lean(batch_v, objective, leaf, {"name": "token_mean"}))
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0], to_floats(metrics)))
    assert found[1][1][at] == 0
    assert found[1][2]["pg/invalid_logprobs"] == 1
    check(found[1], found[0])


def test_logprobs_are_looked_at_themselves_where_no_old_ones_are_given(batch_v):
    objective = batch_v.objective({**TOKEN, "level": "none", "form": "score", "trust": {"name": "none"}})
    now = batch_v.now.clone()
    assert sanitise(lean(batch_v, objective, now, {"name": "token_mean"}), reads_rollout_logprobs=False).is_full
    now[3] = -math.inf
    assert not sanitise(lean(batch_v, objective, now, {"name": "token_mean"}), reads_rollout_logprobs=False).is_full
