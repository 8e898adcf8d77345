"""More places where other frameworks compute something else: moerl's choice, in numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from oracle_batches import make_batch
from oracle_product import evaluate, loss_inputs, of_axes, part, preset

import moerl
from moerl.algorithms.compose import composition_errors, composition_warnings
from moerl.algorithms.presets import PRESETS

TOKEN_MEAN = {"name": "token_mean"}
CLIP = {"trust": {"name": "clip"}, "aggregation": TOKEN_MEAN}


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def spread(batch_v, values):
    return values[torch.repeat_interleave(torch.arange(4), batch_v.lengths)]


def test_live_padding_is_not_summed(batch_v):
    """Batch V padded with tokens that are alive but for the mask: -0.292328, where a peer's numerator has +0.007672."""
    mask = torch.arange(4) < batch_v.lengths[:, None]

    def pad(values, fill):
        return torch.full((4, 4), fill, dtype=torch.float64).masked_scatter(mask, values)

    found = of_axes(CLIP)(
        logprobs=pad(batch_v.now, -0.3),
        old_logprobs=pad(batch_v.old, -0.3),
        advantages=batch_v.sequence_advantages,
        mask=mask,
    )
    assert float(found.loss.detach()) == pytest.approx(-0.292328, abs=2e-6)
    padding = float((~mask).sum(1).double() @ -batch_v.sequence_advantages) / 10
    assert float(found.loss.detach()) + padding == pytest.approx(0.007672, abs=2e-6)


def test_gmpo_does_not_depend_on_how_unevenly_ranks_are_loaded():
    """The mean over answers is that of the minibatch, not of each rank's own."""
    method = preset("gmpo")
    x = loss_inputs(method, [s for s in make_batch(11, "wild") if any(s.mask)])
    whole = float(evaluate(method, x)[0])
    rows = list(range(x.num_seqs))
    sums = [float(evaluate(method, part(x, chosen)[0])[0]) for chosen in (rows[:1], rows[1:])]
    assert sum(sums) == pytest.approx(whole, abs=1e-14)
    local_means = (sums[0] * len(rows) / 1 + sums[1] * len(rows) / (len(rows) - 1)) / 2
    assert local_means != pytest.approx(whole, abs=1e-6)


def test_gspo_with_a_correction_keeps_the_old_policy_in_its_ratio(batch_v):
    """A peer puts the rollout policy there; here the mismatch is a weight beside the ratio."""
    wide = {"level": "seq_geo", "trust": {"name": "none"}, "aggregation": {"name": "seq_mean_token_mean"}}
    plain = batch_v.run(wide)[1]
    corrected = batch_v.run({**wide, "correction": {"name": "tis", "level": "geo", "cap": 1e9}})[1]
    u = spread(batch_v, f64(1.249196, 0.540641, 1.037347, 1.349859))
    torch.testing.assert_close(corrected, plain * u, rtol=1e-6, atol=0)


def test_dppo_is_anchored_on_the_rollout_policy_with_a_cap_of_ten(batch_v):
    for name in ("dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl"):
        values = PRESETS[name].values
        assert (values["anchor"], values["trust"]["cap"]) == ("rollout", 10.0)
        assert any("'div_mask'" in text for text in composition_errors({**values, "anchor": "old"}))
        gradient = batch_v.run({**values, "trust": {**values["trust"], "delta": 1e9}}, batch_v.rollout + 4.0)[1]
        assert float(gradient[0]) == pytest.approx(-10.0 / 16)
        moved = batch_v.run(values, old_logprobs=batch_v.old - 5)[1]
        assert torch.equal(moved, batch_v.run(values)[1])


def test_vespo_is_normalised_by_tokens_and_may_be_a_sum_per_answer(batch_v):
    values = PRESETS["vespo"].values
    assert values["aggregation"] == TOKEN_MEAN
    by_tokens = batch_v.run(values)[1]
    as_in_the_paper = batch_v.run({**values, "aggregation": {"name": "seq_mean_token_sum"}})[1]
    torch.testing.assert_close(as_in_the_paper, by_tokens * 10 / 4)


def test_dcpo_takes_the_mean_of_each_answer_and_not_of_a_micro_batch(batch_v):
    values = {**PRESETS["dcpo"].values, "trust": {"name": "none"}}
    gradient = batch_v.run(values, batch_v.old)[1]
    torch.testing.assert_close(gradient, -spread(batch_v, batch_v.sequence_advantages / batch_v.lengths))


def test_dcpo_has_a_dual_clip_of_ten_and_verl_of_three(batch_v):
    assert PRESETS["dcpo"].values["trust"]["dual_c"] == 10.0
    assert PRESETS["verl/dr_grpo"].values["trust"]["dual_c"] == 3.0
    assert batch_v.run(PRESETS["dcpo"].values, batch_v.old + 2.2)[1][4] > 0  # ratio 9
    assert batch_v.run(PRESETS["dcpo"].values, batch_v.old + 2.4)[1][4] == 0  # ratio 11


def test_gdpo_normalises_over_answers_and_not_over_their_tokens():
    method = moerl.objective("gdpo")
    rewards, groups = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 0, 0, 0])
    short, long = (
        method.advantages(rewards, groups, lengths=torch.tensor(lengths))[0] for lengths in ((1, 1, 1, 1), (1, 9, 3, 7))
    )
    assert torch.equal(short, long)
    assert float(short.mean()) == pytest.approx(0, abs=1e-12)
    assert float(short.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_scalerl_is_the_papers_prompt_mean_and_centred_std():
    values = PRESETS["scalerl"].values
    assert values["aggregation"] == {"name": "prompt_mean"}
    assert values["advantage"]["scale"] == "batch_std_centered"
    assert values["anchor"] == "rollout"


def test_estimators_of_the_kl_are_chosen_by_name_and_grpos_is_k3():
    assert PRESETS["grpo"].values["kl"] == {"place": "loss", "estimator": "k3", "coefficient": 0.04}
    for estimator in ("k2", "k3"):
        assert moerl.objective("grpo", kl={"estimator": estimator}).section.kl.estimator == estimator


def test_tis_truncates_the_mismatch_and_not_the_ratio_to_the_old_policy(batch_v):
    """A peer's variant of that name clips pi / pi_old to [0, 1]."""
    agree = batch_v.run({**CLIP, "correction": {"name": "tis"}}, rollout_logprobs=batch_v.old)
    plain = batch_v.run(CLIP)
    assert torch.equal(agree[1], plain[1])
    assert float(agree[0]) == float(plain[0])


def test_lopti_divides_by_the_tokens_of_both_updates(batch_v):
    """Two optimizer updates a minibatch, rare tokens first, and each token's share that of the full mask."""
    x = batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN)
    rare = batch_v.old.exp() < 0.5
    objective = batch_v.objective({**PRESETS["lopti"].values, "kl": {"place": "none", "coefficient": 0.0}})
    leaf = batch_v.old.clone().requires_grad_()
    loss, _ = objective(dataclasses.replace(x, logprobs=leaf, mask=rare))
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(gradient, torch.where(rare, -spread(batch_v, batch_v.sequence_advantages) / 10, 0.0))


def test_wide_bounds_of_a_sequence_ratio_are_warned_of_and_gspos_own_are_not():
    assert composition_warnings({"level": "seq_geo", "trust": {"name": "clip", "lo": 0.2, "hi": 0.2}})
    assert not composition_warnings(dict(PRESETS["gspo"].values))


def test_a_log_ratio_of_gmpo_is_held_within_twenty_like_any_other():
    """On the side where its own clip does not act: the token then has no gradient, and the mean has its limit."""
    leaf = f64(-60.0, -1.0)
    found = of_axes({"level": "geo_clip", "trust": {"name": "log_clip"}})(
        logprobs=leaf, old_logprobs=f64(-1.0, -1.0), cu_seqlens=torch.tensor([0, 2]), advantages=f64(1.0)
    )
    ratio = math.exp(-20 / 2)
    assert float(found.loss.detach()) == pytest.approx(-ratio)
    assert found.gradient.tolist() == pytest.approx([0.0, -ratio / 2])
