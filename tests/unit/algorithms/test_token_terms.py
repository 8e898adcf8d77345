"""Token weights, update schedules, pairs, likelihood terms and top-k divergences: vectors of batch V, closed forms."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moerl.algorithms.adaptive import Coefficients, adapted_entropy_coefficient, adapted_kl_coefficient
from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.aggregation import term_weights
from moerl.algorithms.compose import value_errors
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.registries import advantage_posts, corrections, objectives, schedules, token_weights
from moerl.algorithms.segments import masked_seq_rank
from moerl.algorithms.token_weight.top_entropy import entropy_threshold
from moerl.algorithms.trust.div_mask import binary_divergence, topk_divergence
from moerl.algorithms.types import CreditInputs
from moerl.config.schema import AdvantageSection, AlgorithmSection, EntropySection, KLSection
from moerl.errors import CheckpointError, ConfigError, DataError
from moerl.metrics import to_floats

TOKEN_MEAN = {"name": "token_mean"}
CLIPPED = {"trust": {"name": "clip"}, "aggregation": TOKEN_MEAN}
NO_KL = {"kl": {"place": "none", "coefficient": 0.0}}


def numbers(text):
    return torch.tensor([float(word) for word in text.replace("|", " ").split()], dtype=torch.float64)


def assert_vector(loss, gradient, text):
    wanted = numbers(text)
    assert float(loss) == pytest.approx(float(wanted[0]), abs=2e-6)
    torch.testing.assert_close(gradient, wanted[1:], rtol=0, atol=2e-6)


WEIGHTED = {
    "dr_grpo_ref_weighted": (
        {**PRESETS["dr_grpo_ref_weighted"].values, **NO_KL},
        "-0.118384 | -0.006253 0 -0.020891 0 0.017768 0 -0.015384 -0.001555 0 0",
    ),
    "prob_reweight": (
        {**CLIPPED, "token_weight": {"name": "prob_reweight", "alpha": 0.3}},
        "-0.246533 | -0.102126 0 -0.062894 0 0.138319 0 -0.031556 -0.050264 0 0",
    ),
    "group_dpo": (
        PRESETS["group_dpo"].values,
        "0.641553 | -0.023626 -0.023626 -0.023626 -0.023626 0.023626 0.023626 -0.023726 -0.023726 -0.023726 0.023726",
    ),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_vectors(batch_v, name):
    values, text = WEIGHTED[name]
    loss, gradient, _ = batch_v.run(values)
    assert_vector(loss, gradient, text)


LOPTI = (
    "-0.293022 | 0 0 -0.074082 0 0 0 -0.038940 0 0 0",
    "0.000694 | -0.105127 0 0 0 0.156831 0 0 -0.051010 0 0",
)


@pytest.mark.parametrize("update", [0, 1])
def test_lopti_restricts_each_update_and_keeps_the_weights_of_all(batch_v, update):
    plugin, cfg = schedules.resolve({"name": "lopti", "eta": 0.5})
    chosen = plugin.target(batch_v.old, cfg)
    assert plugin.traits["updates"] == 2
    leaf = batch_v.now.clone().requires_grad_()
    x = batch_v.inputs(leaf, aggregation=TOKEN_MEAN)
    loss, _ = batch_v.objective(CLIPPED)(dataclasses.replace(x, mask=chosen == update))
    loss.backward()
    assert_vector(loss.detach(), leaf.grad, LOPTI[update])


def test_lopti_and_joint_part_all_tokens(batch_v):
    joint, cfg = schedules.resolve({"name": "joint"})
    assert joint.traits["updates"] == 1
    assert (joint.target(batch_v.old, cfg) == 0).all()
    lopti, cfg = schedules.resolve({"name": "lopti"})
    probability = torch.tensor([0.49999, 0.5, 0.50001], dtype=torch.float64)
    assert lopti.target(probability.log(), cfg).tolist() == [0, 1, 1]


def test_positive_nll_of_vapo(batch_v):
    values = {**CLIPPED, "trust": {"name": "clip", "hi": 0.28}, "positive_nll": {"coefficient": 0.1}}
    section = AlgorithmSection(aggregation=TOKEN_MEAN)
    section.positive_nll.coefficient = 0.1
    rewards = torch.tensor([1.0, 0.0, 0.5, -1.0])
    own = term_weights(section, batch_v.lengths, batch_v.groups, rewards)
    assert set(own) == {"nll"}
    leaf = batch_v.now.clone().requires_grad_()
    x = batch_v.inputs(leaf, aggregation=TOKEN_MEAN)
    weights = dataclasses.replace(x.weights, nll=own["nll"][x.seq_ids])
    loss, metrics = batch_v.objective(values)(dataclasses.replace(x, weights=weights))
    loss.backward()
    assert_vector(
        loss.detach(),
        leaf.grad,
        "-0.216754 | -0.119413 -0.014286 -0.088368 -0.136426 0.156831 0 -0.053226 -0.065296 -0.014286 0",
    )
    good = torch.isin(x.seq_ids, torch.tensor([0, 2]))
    assert to_floats(metrics)["pg/positive_nll"] == pytest.approx(float(-batch_v.now[good].mean()))


def test_no_right_answer_is_no_likelihood_term(batch_v):
    section = AlgorithmSection()
    section.positive_nll.coefficient = 0.1
    own = term_weights(section, batch_v.lengths, batch_v.groups, torch.tensor([0.0, 0.0, -1.0, math.nan]))
    assert (own["nll"] == 0).all()


def test_terms_may_be_aggregated_apart(batch_v):
    section = AlgorithmSection(aggregation=TOKEN_MEAN)
    assert term_weights(section, batch_v.lengths, batch_v.groups, torch.zeros(4)) == {}
    section.term_aggregation.kl = {"name": "seq_mean_token_mean"}
    own = term_weights(section, batch_v.lengths, batch_v.groups, torch.zeros(4))
    torch.testing.assert_close(own["kl"], 1 / (4 * batch_v.lengths.double()))
    section.positive_nll.coefficient = 1.0
    section.term_aggregation.nll = {"name": "same"}
    section.aggregation = {"name": "seq_mean_token_sum"}
    own = term_weights(section, batch_v.lengths, batch_v.groups, torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert own["nll"].tolist() == [0.5, 0.0, 0.5, 0.0]


# Tokens of high entropy


@pytest.mark.parametrize(("q", "count"), [(0.2, 2), (0.21, 3), (1.0, 10), (0.01, 1)])
def test_top_entropy_keeps_its_share_of_the_minibatch(batch_v, q, count):
    values = {**CLIPPED, "token_weight": {"name": "top_entropy", "q": q}}
    objective = batch_v.objective(values)
    assert objective.needs_constants == {"entropy_threshold"}
    assert "old_entropy" in objective.needs
    entropy = torch.tensor([3.0, 1, 4, 1.5, 9, 2.6, 5, 3.5, 8, 7], dtype=torch.float64)
    threshold = entropy_threshold(entropy, q)
    assert threshold == float(entropy.sort(descending=True).values[count - 1])
    x = batch_v.inputs(batch_v.now.clone().requires_grad_(), aggregation=TOKEN_MEAN)
    x = dataclasses.replace(
        x, constants={"entropy_threshold": threshold}, optional={**x.optional, "old_entropy": entropy}
    )
    loss, _ = objective(x)
    kept = torch.where(entropy >= threshold, 1.0, 0.0)
    plain = batch_v.objective(CLIPPED).token_losses(x)[0]
    assert int(kept.sum()) == count
    assert float(loss.detach()) == pytest.approx(float((plain.detach() * kept).sum()), abs=1e-15)


def test_top_entropy_of_no_token():
    assert entropy_threshold(torch.zeros(0), 0.2) == math.inf


# Pairs


def test_pairs_ignore_answers_that_are_neither_best_nor_worst(batch_v):
    """The middle answer of a group of three has advantage 0 and no gradient."""
    x = batch_v.inputs(batch_v.now.clone().requires_grad_(), aggregation={"name": "prompt_mean"})
    groups = torch.tensor([0, 0, 0, 1])
    signs = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64)[x.seq_ids]
    x = dataclasses.replace(x, advantages=signs, optional={**x.optional, "group_ids": groups})
    loss, _ = batch_v.objective(PRESETS["group_dpo"].values)(x)
    (gradient,) = torch.autograd.grad(loss, x.logprobs)
    of_group = x.weights.policy[torch.isin(x.seq_ids, torch.tensor([0, 1, 2]))].sum()
    change = batch_v.now - batch_v.ref
    margin = 0.1 * (change[:4].sum() - change[6:9].sum())
    assert float(loss.detach()) == pytest.approx(float(-of_group * torch.nn.functional.logsigmoid(margin)))
    assert (gradient[4:6] == 0).all()
    assert gradient[9] == 0


def test_length_norm_divides_by_the_answers_own_tokens(batch_v):
    values = {**PRESETS["group_dpo"].values, "objective": {"name": "group_dpo", "beta": 0.1, "length_norm": True}}
    loss, _, metrics = batch_v.run(values)
    change = [part.mean() for part in (batch_v.now - batch_v.ref).split([4, 2, 3, 1])]
    margins = 0.1 * torch.stack([change[0] - change[1], change[2] - change[3]])
    assert float(loss) == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()))
    tokens = torch.tensor([6.0, 4.0])
    assert metrics["dpo/accuracy"] == pytest.approx(float(((margins > 0) * tokens).sum() / 10))


def test_a_pair_in_two_micro_batches_is_refused(batch_v):
    x = batch_v.inputs(batch_v.now, aggregation={"name": "prompt_mean"}, rows=slice(0, 1))
    with pytest.raises(DataError, match="pack the two together"):
        batch_v.objective(PRESETS["group_dpo"].values)(x)


# Divergences


def test_topk_divergence_vectors():
    """Rollout (.5, .3, .1, .06, .04), policy (.4, .35, .12, .08, .05), sampled token 2."""
    b = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04], dtype=torch.float64).log()
    p = torch.tensor([0.4, 0.35, 0.12, 0.08, 0.05], dtype=torch.float64).log()
    assert float(binary_divergence("binary_tv", p[2], b[2])) == pytest.approx(0.02, abs=1e-6)
    assert float(binary_divergence("binary_kl", p[2], b[2])) == pytest.approx(0.001993, abs=1e-6)
    top = slice(0, 3)
    assert float(topk_divergence("topk_tv", p[top][None], b[top][None])) == pytest.approx(0.1, abs=1e-6)
    assert float(topk_divergence("topk_kl", p[top][None], b[top][None])) == pytest.approx(0.020858, abs=1e-6)
    assert float(topk_divergence("topk_tv", p[None], b[None])) == pytest.approx(0.1, abs=1e-6)
    assert float(topk_divergence("topk_kl", p[None], b[None])) == pytest.approx(0.020908, abs=1e-6)


def test_a_column_that_is_not_there_does_not_count():
    b = torch.tensor([[0.5, 0.3, 0.1]], dtype=torch.float64).log()
    p = torch.tensor([[0.4, 0.35, 0.12]], dtype=torch.float64).log()
    absent = torch.full((1, 1), -math.inf, dtype=torch.float64)
    for kind in ("topk_tv", "topk_kl"):
        wide = topk_divergence(kind, torch.cat([p, absent], 1), torch.cat([b, absent], 1))
        torch.testing.assert_close(wide, topk_divergence(kind, p, b))


def test_sampled_and_two_sided_forms(batch_v):
    def masked(**trust):
        values = {**PRESETS["dppo_tv"].values, "aggregation": TOKEN_MEAN, "trust": {"name": "div_mask", **trust}}
        return batch_v.run(values)[1] == 0

    d = batch_v.now - batch_v.rollout
    sign = torch.tensor([1, 1, 1, 1, -1, -1, 1, 1, 1, -1])
    sampled = batch_v.now.exp() * d > 0.05
    assert torch.equal(masked(kind="sampled_kl", delta=0.05), sampled & (d * sign > 0))
    far = (batch_v.now.exp() - batch_v.rollout.exp()).abs() > 0.05
    assert torch.equal(masked(kind="binary_tv", delta=0.05, one_sided=False), far)
    assert far.sum() > (far & (d * sign > 0)).sum()


def test_token_rank_spares_all_but_the_largest_of_each_answer(batch_v):
    values = {**PRESETS["dppo_tv"].values, "aggregation": TOKEN_MEAN}
    trust = {"name": "div_mask", "kind": "binary_tv", "delta": 0.0, "one_sided": False, "token_rank": 1}
    gradient = batch_v.run({**values, "trust": trust})[1]
    divergence = (batch_v.now.exp() - batch_v.rollout.exp()).abs()
    largest = torch.cat([part == part.max() for part in divergence.split([4, 2, 3, 1])])
    assert torch.equal(gradient == 0, largest)


def test_ranks_within_sequences():
    values = torch.tensor([1.0, 3.0, 3.0, 9.0, 5.0, 2.0])
    mask = torch.tensor([True, True, True, False, True, True])
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    assert masked_seq_rank(values, mask, ids).tolist() == [2, 0, 1, 3, 0, 1]


def test_topk_needs_are_declared(batch_v):
    for name in ("dppo_topk_tv", "dppo_topk_kl"):
        assert batch_v.objective(PRESETS[name].values).needs == {"topk_logprobs", "rollout_topk"}
    assert batch_v.objective(PRESETS["dppo_tv"].values).needs == frozenset()


# Corrections


def test_vaco_drops_what_moves_an_answer_further_away(batch_v):
    plugin, cfg = corrections.resolve({"name": "vaco", "bound": 0.3})
    x = batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN)
    kept = plugin.target(x, cfg).keep
    c = batch_v.old - batch_v.rollout
    distance = torch.cat(
        [torch.full_like(part, float(part.mean())) for part in (c.exp() - 1).abs().split([4, 2, 3, 1])]
    )
    assert torch.equal(kept, ~((x.advantages * c > 0) & (distance > 0.3)))
    assert 0 < int(kept.sum()) < 10


# Coefficients that adapt


def test_kl_coefficient_follows_its_target():
    assert adapted_kl_coefficient(0.1, 0.02, 0.02) == pytest.approx(0.1)
    assert adapted_kl_coefficient(0.1, 0.022, 0.02) == pytest.approx(0.1 * 1.01)
    assert adapted_kl_coefficient(0.1, 9.0, 0.02) == pytest.approx(0.1 * 1.02)
    assert adapted_kl_coefficient(0.1, -9.0, 0.02) == pytest.approx(0.1 * 0.98)


def test_entropy_coefficient_rises_while_the_entropy_is_low():
    assert adapted_entropy_coefficient(0.01, 0.2, 0.2, 0.005) == pytest.approx(0.015)
    assert adapted_entropy_coefficient(0.01, 0.3, 0.2, 0.005) == pytest.approx(0.005)
    assert adapted_entropy_coefficient(0.001, 0.3, 0.2, 0.005) == 0.0


def test_the_entropy_bonus_is_off_while_the_entropy_is_high():
    kl, entropy = KLSection(coefficient=0.1), EntropySection(coefficient=0.01, target=0.2, step=0.005)
    held = Coefficients.start(kl, entropy)
    held.adapt_kl(5.0, kl)
    assert held.kl == 0.1
    held.adapt_entropy(0.3, entropy)
    assert held.applied_entropy == 0.0
    held.adapt_entropy(0.1, entropy)
    assert held.applied_entropy == pytest.approx(0.01)
    again = Coefficients.start(kl, entropy)
    again.load_state_dict(held.state_dict())
    assert again == held


def test_adaptive_coefficients_reach_the_loss(batch_v):
    values = {**CLIPPED, "kl": {"place": "loss", "estimator": "k2", "coefficient": 0.5, "target": 0.1}}
    objective = batch_v.objective(values)
    assert objective.needs_constants == {"kl_coefficient"}
    x = batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN)
    losses = [float(objective(dataclasses.replace(x, constants={"kl_coefficient": c}))[0]) for c in (0.0, 1.0)]
    fixed = {**values, "kl": {"place": "loss", "estimator": "k2", "coefficient": 1.0}}
    assert losses[0] == pytest.approx(float(batch_v.run(CLIPPED)[0]))
    assert losses[1] == pytest.approx(float(batch_v.run(fixed)[0]))
    entropy = {**CLIPPED, "entropy": {"place": "loss", "target": 0.1}}
    assert batch_v.objective(entropy).needs_constants == {"entropy_coefficient"}


def test_a_correction_and_a_token_weight_are_factors_of_one_product(batch_v):
    tis, weight = {"correction": {"name": "tis"}}, {"token_weight": {"name": "prob_reweight", "alpha": 0.3}}
    plain, corrected, weighted, both = (
        batch_v.run({**CLIPPED, **more})[1] for more in ({}, tis, weight, {**tis, **weight})
    )
    assert not torch.allclose(corrected, plain)
    assert not torch.allclose(weighted, plain)
    torch.testing.assert_close(both * plain, corrected * weighted, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"token_weight": {"name": "prob_reweight", "alpha": 1.5}}, "token_weight.alpha is 1.5"),
        ({"token_weight": {"name": "top_entropy", "q": 0.0}}, "token_weight.q is 0.0"),
        ({"objective": {"name": "group_dpo", "beta": 0.0}}, "objective.beta is 0.0|best_worst"),
        ({"trust": {"name": "div_mask", "kind": "tv"}}, "div_mask|trust.kind"),
        ({"correction": {"name": "tis", "rejected": "drop"}}, "correction.rejected is 'drop'"),
        ({"correction": {"name": "rs", "rejected": "drop"}}, "correction.rejected is 'drop'"),
    ],
)
def test_wrong_arguments(batch_v, values, words):
    with pytest.raises(ConfigError, match=words):
        batch_v.objective({**CLIPPED, **values})


def test_the_plain_choices_are_what_their_names_say(batch_v):
    x = batch_v.inputs(batch_v.now, aggregation=TOKEN_MEAN)
    one, cfg = token_weights.resolve({"name": "one"})
    assert (one.target(x, cfg) == 1).all()
    gradient, cfg = objectives.resolve({"name": "policy_gradient"})
    assert not gradient.traits["replaces"]
    torch.testing.assert_close(gradient.target(x, cfg).loss, -x.advantages * x.logprobs)


def test_whitening_nothing_and_equal_values():
    plugin, cfg = advantage_posts.resolve({"name": "whiten_tokens"})
    assert len(plugin.target(torch.zeros(0, dtype=torch.float64), cfg)) == 0
    assert (plugin.target(torch.full((3,), 0.5, dtype=torch.float64), cfg) == 0).all()
    sample, cfg = advantage_posts.resolve({"name": "whiten_tokens", "ddof": 1})
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(sample.target(values, cfg), (values - values.mean()) / (values.std() + 1e-8))


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ((0.2, 0.9, 0.4, 0.9), [-1, 1, 0, 0]),
        ((0.0, 0.0, 1.0, 1.0), [-1, 0, 1, 0]),
        ((0.5, 0.5, 0.5, 0.5), [0, 0, 0, 0]),
        ((math.nan, 0.1, 0.3, math.nan), [0, -1, 1, 0]),
    ],
)
def test_best_and_worst_are_the_first_of_those_that_tie(rewards, wanted):
    rows = torch.tensor([*rewards, 7.0], dtype=torch.float64).unsqueeze(1)
    groups = torch.tensor([0, 0, 0, 0, 1])
    ones, zeros = torch.ones(1, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    section = AdvantageSection(center="none", scale="none", transform={"name": "best_worst"})
    found, _ = group_advantages(section, CreditInputs(rows, ones, groups, groups, ("p",) * 5, zeros))
    assert found.tolist() == [*wanted, 0]


def test_coefficients_without_a_target_hold_and_a_damaged_memory_is_refused():
    held = Coefficients.start(KLSection(coefficient=0.1), EntropySection(coefficient=0.2))
    held.adapt_entropy(9.0, EntropySection())
    assert (held.kl, held.applied_entropy) == (0.1, 0.2)
    with pytest.raises(CheckpointError, match="lacks 'kl'"):
        held.load_state_dict({})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kl": {"target": 0.0}}, "algorithm.kl.target is 0.0"),
        ({"entropy": {"target": math.inf}}, "algorithm.entropy.target is inf"),
        ({"positive_nll": {"threshold": math.nan}}, "algorithm.positive_nll.threshold is nan"),
        ({"positive_nll": {"coefficient": -1.0}}, "algorithm.positive_nll.coefficient is -1.0"),
        ({"entropy": {"step": math.inf}}, "algorithm.entropy.step is inf"),
    ],
)
def test_numbers_out_of_bounds(values, words):
    (error,) = value_errors(values)
    assert error.startswith(words)
