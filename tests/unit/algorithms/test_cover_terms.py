"""Terms beside the policy's own: teacher, importance-weighted KL; and what is reported when little is known."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moerl.algorithms import blocks
from moerl.algorithms.kl import kl_estimate
from moerl.algorithms.objective import build_objective
from moerl.algorithms.registries import corrections, trust_regions
from moerl.algorithms.trust.none import NoTrustConfig, unbounded
from moerl.config.schema import AlgorithmSection, KLSection, TeacherSection
from moerl.errors import ConfigError
from moerl.metrics import to_floats

UNBOUNDED = {"name": "none"}


def uniform(batch_v, leaf):
    return batch_v.inputs(leaf, aggregation={"name": "token_mean"})


def with_fields(x, **fields):
    return dataclasses.replace(x, optional={**x.optional, **fields})


def without(x, *names):
    return dataclasses.replace(x, optional={name: values for name, values in x.optional.items() if name not in names})


def test_a_teachers_kl_in_the_loss_is_k3_times_its_coefficient(batch_v):
    section = AlgorithmSection(trust=UNBOUNDED, teacher=TeacherSection(path="teacher", place="kl", coefficient=0.3))
    objective, plain = build_objective(section), build_objective(AlgorithmSection(trust=UNBOUNDED))
    assert objective.needs == {"old_logprobs", "teacher_logprobs"}
    leaf = batch_v.now.clone().requires_grad_()
    x = with_fields(uniform(batch_v, leaf), teacher_logprobs=batch_v.rollout)
    loss, metrics = objective(x)
    gap = leaf - batch_v.rollout
    k3 = torch.exp(-gap) - 1 + gap
    torch.testing.assert_close(loss - plain(x)[0], 0.3 * k3.mean(), rtol=1e-12, atol=1e-14)
    assert to_floats(metrics)["kl/teacher"] == pytest.approx(k3.mean().item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss - plain(x)[0], leaf)
    torch.testing.assert_close(gradient, 0.3 * (1 - torch.exp(-gap.detach())) / 10, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_importance_weighted_kl_has_the_ratio_in_value_and_gradient(batch_v, estimator):
    kl = KLSection(place="loss", estimator=estimator, coefficient=0.5, importance=True)
    objective = build_objective(AlgorithmSection(level="none", form="score", trust=UNBOUNDED, kl=kl))
    plain = build_objective(AlgorithmSection(level="none", form="score", trust=UNBOUNDED))
    assert objective.needs == {"old_logprobs", "ref_logprobs"}
    assert plain.needs == set()
    leaf = batch_v.now.clone().requires_grad_()
    x = uniform(batch_v, leaf)
    d = leaf - batch_v.ref
    value = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]
    wanted = 0.5 * (torch.exp(leaf - batch_v.old) * value).mean()
    found = objective(x)[0] - plain(x)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaf)[0], torch.autograd.grad(wanted, leaf)[0], rtol=1e-9, atol=1e-13
    )


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="KL estimator 'k4'; choose k1, k2 or k3"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))


def test_a_loss_from_elsewhere_in_the_wrong_form_is_refused():
    before = dict(trust_regions._plugins)
    try:
        trust_regions.register("ratio_only", NoTrustConfig, form="ratio")(unbounded)
        with pytest.raises(ConfigError, match=r"form is 'score' but algorithm.trust 'ratio_only' has only the form"):
            build_objective(AlgorithmSection(form="score", trust={"name": "ratio_only"}))
    finally:
        trust_regions._plugins.clear()
        trust_regions._plugins.update(before)


def test_a_loss_that_promises_its_slope_must_give_it(batch_v, monkeypatch):
    before = dict(trust_regions._plugins)
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 3)
    try:
        trust_regions.register("promises", NoTrustConfig, form="ratio", has_slope=lambda cfg: True)(unbounded)
        objective = build_objective(AlgorithmSection(trust={"name": "promises"}))
        with pytest.raises(TypeError, match="registered with has_slope returned a TokenLoss without slope"):
            objective(dataclasses.replace(uniform(batch_v, batch_v.now), optional={"old_logprobs": batch_v.old}))
    finally:
        trust_regions._plugins.clear()
        trust_regions._plugins.update(before)


def test_a_field_that_a_loss_asks_for_twice_is_asked_for():
    before = dict(trust_regions._plugins)
    try:
        asks = {"form": "ratio", "needs": ("entropy",), "needs_of": lambda cfg: ("entropy", "ref_logprobs")}
        trust_regions.register("asks_twice", NoTrustConfig, **asks)(unbounded)
        objective = build_objective(AlgorithmSection(trust={"name": "asks_twice"}))
        assert objective.needs == {"old_logprobs", "entropy", "ref_logprobs"}
    finally:
        trust_regions._plugins.clear()
        trust_regions._plugins.update(before)


def test_no_correction_weighs_nothing_and_keeps_everything(batch_v):
    plugin, cfg = corrections.resolve({"name": "none"})
    found = plugin.target(uniform(batch_v, batch_v.now.clone().requires_grad_()), cfg)
    assert found.weight.tolist() == [1.0] * 10
    assert not found.weight.requires_grad
    assert found.keep.all()


def test_a_sequence_ratio_reports_the_same_by_the_short_way_and_by_the_long_one(batch_v):
    """The short way takes whole sequences at once; a masked token makes the long way of the same tokens."""
    section = AlgorithmSection(level="seq_geo", trust=UNBOUNDED)
    objective = build_objective(section)
    whole = with_fields(uniform(batch_v, batch_v.now.clone().requires_grad_()), entropy=-batch_v.now)
    tail = torch.tensor([9])
    longer = dataclasses.replace(
        whole,
        **{
            name: torch.cat([getattr(whole, name), getattr(whole, name)[tail]])
            for name in ("logprobs", "rollout_logprobs", "advantages", "seq_ids")
        },
        mask=torch.arange(11) < 10,
        weights=type(whole.weights).shared(torch.cat([whole.weights.policy, whole.weights.policy[tail]])),
        optional={
            name: values if name == "group_ids" else torch.cat([values, values[tail]])
            for name, values in whole.optional.items()
        },
    )
    loss, short = objective(whole)
    other, long = objective(longer)
    assert loss.item() == pytest.approx(other.item(), rel=1e-12)
    assert to_floats(short) == pytest.approx(to_floats(long), rel=1e-9)
    assert to_floats(short)["pg/entropy"] == pytest.approx(-batch_v.now.mean().item(), rel=1e-12)


@pytest.mark.parametrize("level", ["token", "seq_geo"])
def test_without_old_logprobs_no_distance_from_them_is_reported(batch_v, level):
    objective = build_objective(AlgorithmSection(anchor="rollout", level=level, trust=UNBOUNDED))
    x = dataclasses.replace(uniform(batch_v, batch_v.now.clone().requires_grad_()), optional={})
    for mask in (x.mask, torch.arange(10) != 3):
        found = to_floats(objective(dataclasses.replace(x, mask=mask))[1])
        assert "pg/kl_old" not in found
        assert found["pg/ratio_max"] > 0
    assert to_floats(objective(uniform(batch_v, x.logprobs))[1])["pg/kl_old"] == pytest.approx(
        (batch_v.old - batch_v.now).mean().item(), rel=1e-12
    )


def test_a_field_that_nobody_declared_says_so(batch_v):
    x = without(uniform(batch_v, batch_v.now), "old_logprobs")
    with pytest.raises(AttributeError, match=r"old_logprobs was read but no part .* declared needs=\{'old_logprobs'\}"):
        _ = x.old_logprobs
    with pytest.raises(AttributeError, match=r"^logits$"):
        _ = x.logits
