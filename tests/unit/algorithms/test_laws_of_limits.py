"""Laws between methods on random batches: what a method becomes where bounds are far, weights one and gates soft; score
and ratio forms of one gradient; nothing but the logprobs receives any; log-ratios are clamped, and that is counted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_batches import SPREADS, make_batch, tensors
from oracle_product import PRESETS, evaluate, loss_inputs, preset

import moerl
from moerl.api import Method
from moerl.config.schema import AlgorithmSection
from moerl.metrics import to_floats

PAIRS = "group_dpo"
SEEDS = st.integers(0, 2**32)
FAR = 1e30
NONE = {"name": "none"}
MOVING = [name for name in PRESETS if name != PAIRS and preset(name).section.level != "none"]
"""Methods with a ratio."""


def changed(section: AlgorithmSection, **axes: Any) -> AlgorithmSection:
    return dataclasses.replace(section, **axes)


def shifted(section: AlgorithmSection, *, enabled: bool) -> AlgorithmSection:
    return changed(section, router_shift=dataclasses.replace(section.router_shift, enabled=enabled))


def trust_limits(section: AlgorithmSection) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(label, axes of the limit, axes of what it is the limit to), of the section's own trust region."""
    trust = dict(section.trust)
    if trust["name"] == "clip":
        yield "delta", {"trust": {**trust, "delta": FAR}}, {}
        if trust.get("dual_c") is None:
            yield "dual_c", {"trust": {**trust, "dual_c": FAR}}, {}
        yield "clip", {"trust": {"name": "clip", "lo": 1.0, "hi": FAR}}, {"trust": NONE}
        yield "soft_gate", {"trust": {"name": "soft_gate", "tau_pos": 1e-7, "tau_neg": 1e-7}}, {"trust": NONE}
    bounds: dict[str, dict[str, Any]] = {
        "is_clip": {"min": 0.0, "max": FAR},
        "div_mask": {"delta": FAR, "cap": FAR},
        "ratio_mask": {"lo": 1.0, "hi": FAR, "cap": FAR},
        "dyn_clip": {"lo": FAR, "hi": FAR, "max": FAR, "dual_c": FAR},
        "position_clip": {"lo": FAR, "hi": 600.0},
        "soft_gate": {"tau_pos": 1e-7, "tau_neg": 1e-7},
        "gamma_kernel": {"k_pos": 1.0, "k_neg": 1.0, "lam_pos": 1e-13, "lam_neg": 1e-13},
    }
    if trust["name"] in bounds:
        yield trust["name"], {"trust": {**trust, **bounds[trust["name"]]}}, {"trust": NONE}
    if trust["name"] == "log_clip" and section.router_shift.stage != "after_clip":
        far = {"trust": {**trust, "lo": 1e3, "hi": 1e3}}
        yield "log_clip", far, {"level": "seq_geo", "trust": NONE}
    if trust["name"] == "position_clip":
        flat = {"name": "clip", "lo": -math.expm1(-trust["lo"]), "hi": math.expm1(trust["hi"])}
        yield "power", {"trust": {**trust, "power": 0.0}}, {"trust": flat}


def correction_limits(section: AlgorithmSection) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    rejections: dict[str, dict[str, Any]] = {"rs": {"threshold": FAR, "stat": "token"}}
    if section.schedule["name"] == "joint":  # others look at whole answers, of which an update of Lopti sees a part
        rejections |= {"opsm": {"delta": FAR}, "vaco": {"bound": FAR}}
    for name, bound in rejections.items():
        yield name, {"correction": {"name": name, **bound}}, {"correction": NONE}
    if section.anchor == "rollout":
        return
    of_answers = {"level": "seq"} if section.level == "geo_clip" else {}
    yield "mis_one", {"correction": {"name": "mis", "max": FAR, "weight": "one", **of_answers}}, {"correction": NONE}
    uncapped = {"correction": {"name": "tis", "cap": FAR, **of_answers}}
    yield "tis", uncapped, {"correction": {"name": "mis", "max": FAR, **of_answers}}
    if section.level != "geo_clip":
        yield "icepop", {"correction": {"name": "icepop", "min": 0.0, "max": FAR}}, uncapped
    if section.level != "geo_clip" and section.schedule["name"] == "joint":
        band = {"name": "seq_mask_tis", "cap": FAR, "min": 0.0, "max": FAR}
        yield "seq_mask_tis", {"correction": band}, uncapped


def weight_limits(section: AlgorithmSection) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    if section.level != "geo_clip":  # whose mean takes one weight for an answer
        yield from token_weight_limits()
    nothing = dataclasses.replace(section.kl, place="loss", estimator="k3", coefficient=0.0)
    off = dataclasses.replace(section.kl, place="none", coefficient=0.0)
    if section.kl.place != "reward":
        yield "kl", {"kl": nothing}, {"kl": off}


def token_weight_limits() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    yield "prob_reweight", {"token_weight": {"name": "prob_reweight", "alpha": 0.0}}, {"token_weight": {"name": "one"}}
    yield "top_entropy", {"token_weight": {"name": "top_entropy", "q": 1.0}}, {"token_weight": {"name": "one"}}


CREDIT = ("preset", "advantage", "filters", "shaping", "refill_rounds", "critic", "aggregation")
"""Axes of which the objective sees nothing but what they leave in its inputs."""


@functools.cache
def limits_of(name: str) -> dict[str, tuple[Method, Method]]:
    """Limit -> the method at it, and the one that it must be."""
    section = preset(name).section
    found = {"gamma": (shifted(section, enabled=True), shifted(section, enabled=False))}
    for limits in (trust_limits, correction_limits, weight_limits):
        for label, axes, base in limits(section):
            found[label] = (changed(section, **axes), changed(section, **base))
    return {label: (moerl.objective(limit), moerl.objective(base)) for label, (limit, base) in found.items()}


def one_of_each_objective() -> list[str]:
    """Presets that differ in credit or denominators alone have one objective."""
    first: dict[str, str] = {}
    for name in MOVING:
        section = vars(preset(name).section)
        first.setdefault(str({key: value for key, value in section.items() if key not in CREDIT}), name)
    return sorted(first.values())


def without_shift(batch):
    return [dataclasses.replace(s, gamma=[1.0] * len(s.mask)) for s in batch]


@pytest.mark.parametrize("name", one_of_each_objective())
@settings(max_examples=2)
@given(seed=SEEDS, dtype=st.sampled_from((torch.float64, torch.float32)))
def test_far_bounds_and_neutral_weights_are_the_base_method(name, seed, dtype):
    """Gradients alone, for a soft gate's value is another one."""
    for label, (limit, base) in limits_of(name).items():
        # DCPO's lower bound never falls below a half.
        kind = "calm" if label == "dyn_clip" else "wild"
        batch = without_shift(make_batch(f"{name} {label} {seed}", kind, dtype))
        _, found, _ = evaluate(limit, loss_inputs(limit, batch, dtype))
        _, wanted, _ = evaluate(base, loss_inputs(base, batch, dtype))
        tolerances = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-7}
        torch.testing.assert_close(found, wanted, **tolerances, msg=lambda text, label=label: f"{label}: {text}")


def test_every_limit_is_reached_by_some_preset():
    assert {label for name in one_of_each_objective() for label in limits_of(name)} == {
        *("delta", "dual_c", "clip", "soft_gate", "is_clip", "div_mask", "ratio_mask", "dyn_clip", "position_clip"),
        *("gamma_kernel", "log_clip", "power", "rs", "opsm", "vaco", "mis_one", "tis", "icepop", "seq_mask_tis"),
        *("prob_reweight", "top_entropy", "kl", "gamma"),
    }


def unbound(section: AlgorithmSection, form: str) -> AlgorithmSection:
    """The section's gradient without a bound. GMPO's level without its clip is GSPO's."""
    level = {"geo_clip": "seq_geo", "none": "token"}.get(section.level, section.level)
    if section.router_shift.stage == "after_clip":  # inside GMPO's mean
        section = shifted(section, enabled=False)
    return changed(section, form=form, level=level, trust=NONE)


SAME_FORMS = [n for n in PRESETS if n != PAIRS and preset(n).section.level != "seq_prod"]
"""The product of an answer has the gradient of its tokens' sum: in score form it counts once, in ratio form n times."""


@functools.cache
def form_of(name: str, form: str) -> Method:
    return moerl.objective(unbound(preset(name).section, form))


@pytest.mark.parametrize("name", SAME_FORMS)
@settings(max_examples=3)
@given(seed=SEEDS)
def test_score_and_ratio_forms_have_one_gradient_without_bounds(name, seed):
    batch = make_batch(f"{name} {seed}", "wild")
    if preset(name).section.router_shift.stage == "after_clip":
        batch = without_shift(batch)
    score, ratio = (form_of(name, form) for form in ("score", "ratio"))
    _, wanted, _ = evaluate(ratio, loss_inputs(ratio, batch))
    _, found, _ = evaluate(score, loss_inputs(score, batch))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def barely_moved(batch):
    """Policies within 1e-5 nats of the old one: no bound of any preset binds, gates and kernels are 1."""

    def near(old, other):
        return [a + 1e-5 * max(-1.0, min(1.0, b - a)) if on else b for a, b, on in zip(old, other, mask, strict=True)]

    moved = []
    for s in without_shift(batch):
        mask = s.mask
        moved.append(dataclasses.replace(s, now=near(s.old, s.now), roll=near(s.old, s.roll), top_roll=s.top_now))
    return moved


@pytest.mark.parametrize("name", SAME_FORMS)
@settings(max_examples=3)
@given(seed=SEEDS)
def test_where_nothing_binds_a_method_is_its_own_score_form(name, seed):
    batch = barely_moved(make_batch(f"{name} {seed}", "wild", garbage=False))
    method, score = preset(name), form_of(name, "score")
    _, found, metrics = evaluate(method, loss_inputs(method, batch))
    rtol = (
        1e-4 if preset(name).section.level == "none" else 1e-8
    )  # without a ratio: the score form's is 1 but for the move
    _, wanted, _ = evaluate(score, loss_inputs(score, batch))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-12)
    values = to_floats(metrics)
    assert all(values[key] == 0 for key in values if key.startswith(("pg/clip", "pg/clamped", "pg/dual", "mm/reject")))


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=2)
@given(seed=SEEDS, kind=st.sampled_from(sorted(SPREADS)))
def test_nothing_but_the_logprobs_receives_gradient(name, seed, kind):
    """Advantages, weights, ratios to other policies, gates, kernels, masks and bounds are all held still."""
    method = preset(name)
    x = loss_inputs(method, make_batch(f"{name} {seed}", kind))
    others = {"advantages": x.advantages, "rollout_logprobs": x.rollout_logprobs, **x.optional}
    others = {n: v.clone().requires_grad_() for n, v in others.items() if v.dtype.is_floating_point}
    optional = {n: others.get(n, v) for n, v in x.optional.items()}
    x = dataclasses.replace(
        x,
        logprobs=x.logprobs.clone().requires_grad_(),
        optional=optional,
        advantages=others["advantages"],
        rollout_logprobs=others["rollout_logprobs"],
    )
    loss, metrics = method.objective(x)
    gradients = torch.autograd.grad(loss, list(others.values()), allow_unused=True)
    received = [n for n, g in zip(others, gradients, strict=True) if g is not None]
    assert received == []
    parts = [part for metric in metrics.values() for part in dataclasses.astuple(metric)]
    assert not any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)


def far_tokens(section: AlgorithmSection, batch) -> float:
    """Share of the live tokens whose own log-ratio is beyond the clamp."""
    anchors = [s.old if section.anchor == "old" else s.roll for s in batch]
    far = [
        abs(s.now[t] - anchor[t]) > 20
        for s, anchor in zip(batch, anchors, strict=True)
        for t in range(len(s.mask))
        if s.mask[t]
    ]
    return sum(far) / len(far)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=3)
@given(seed=SEEDS, dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_log_ratios_of_ten_thousand_stay_finite_and_are_counted(name, seed, dtype):
    batch = make_batch(f"{name} {seed}", "extreme", dtype)
    method = preset(name)
    found = method(**tensors(batch, dtype, skip=("advantages",)))
    assert found.loss.isfinite()
    assert found.gradient.isfinite().all()
    assert all(math.isfinite(value) for value in found.metrics.values())
    section = method.section
    if section.level == "token" and not section.router_shift.enabled and section.objective["name"] != PAIRS:
        assert found.metrics["pg/clamped"] == pytest.approx(far_tokens(section, batch), abs=1e-9)
