"""Every gradient against central differences in float64, away from kinks: all presets, all forms, masks, terms, KLs.

What a method holds still has to be held still at the moved points as well, so `Tensor.detach` gives there what it gave
at the point itself: the differences are then of just the function whose gradient autograd is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle_batches import make_batch
from oracle_credit import CREDITS
from oracle_methods import CASES, METHODS, loss
from oracle_numbers import margin
from oracle_product import PRESETS, case, evaluate, loss_inputs

from moerl.algorithms import kl
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.values import value_loss
from moerl.metrics import Metrics

SEEDS = st.integers(0, 2**32)
STEP = 1e-6
FAR_ENOUGH = 1e-4
"""From a kink: a hundred steps."""


class Held:
    """What `detach` gave, in order."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember it."""
        original = torch.Tensor.detach

        def detach(tensor: torch.Tensor) -> torch.Tensor:
            self.values.append(original(tensor).clone())
            return original(tensor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", detach)
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give the same once more; as often as before, or it is another function."""
        left = iter(self.values)

        def detach(tensor: torch.Tensor) -> torch.Tensor:
            value = next(left)
            assert value.shape == tensor.shape
            return value.clone()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", detach)
            yield
        assert next(left, None) is None


def slope_by_differences(function, at, held):
    """Along one direction; `function(direction * step)` is a number."""
    ends = []
    for step in (STEP, -STEP):
        with held.again():
            ends.append(function(step * at))
    return float(ends[0] - ends[1]) / (2 * STEP)


def random_directions(size, seed, number=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(number)]


def assert_slopes(function, gradient, held, seed):
    for direction in random_directions(gradient.shape, seed):
        slope = slope_by_differences(function, direction, held)
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-7)


def away_from_kinks(name, batch):
    """With the advantages of the method; a batch near a kink of it is not used."""
    credit = CREDITS.get(name, CREDITS["grpo"])
    batch = [dataclasses.replace(s, advantage=row) for s, row in zip(batch, credit(batch), strict=True)]
    margin()
    loss(METHODS[name] if name in METHODS else CASES[name][1], batch)
    assume(margin() > FAR_ENOUGH)


@pytest.mark.parametrize("name", [*PRESETS, *CASES])
@settings(max_examples=2)
@given(seed=SEEDS)
def test_loss_of_every_method(name, seed):
    method = case(name)
    batch = make_batch(f"{name} {seed}", "wild", garbage=False)
    away_from_kinks(name, batch)
    x = loss_inputs(method, batch)
    held = Held()
    with held.recorded():
        method.objective(dataclasses.replace(x, logprobs=x.logprobs.clone().requires_grad_()))
    _, gradient, _ = evaluate(method, x)

    def moved(by):
        return method.objective(dataclasses.replace(x, logprobs=x.logprobs + torch.where(x.mask, by, 0)))[0]

    assert (gradient[~x.mask] == 0).all()
    assert_slopes(moved, gradient, held, seed)


def test_every_trust_region_is_among_them():
    own = {name for name in trust_regions.names() if trust_regions.get(name).target.__module__.startswith("moerl.")}
    assert own == {case(name).section.trust["name"] for name in (*PRESETS, *CASES)}


@pytest.mark.parametrize("name", ["entropy", "terms apart"])
@settings(max_examples=2)
@given(seed=SEEDS)
def test_the_entropy_term_passes_gradient_to_the_entropy(name, seed):
    method = case(name)
    x = loss_inputs(method, make_batch(f"{name} {seed}", "wild", garbage=False))
    leaf = x.optional["entropy"].clone().requires_grad_()
    held = Held()

    def value(entropy) -> tuple[torch.Tensor, Metrics]:
        return method.objective(dataclasses.replace(x, optional={**x.optional, "entropy": entropy}))

    with held.recorded():
        found, _ = value(leaf)
    (gradient,) = torch.autograd.grad(found, leaf)
    assert bool((gradient != 0).any()) == bool(x.mask.any())
    assert_slopes(lambda by: value(x.optional["entropy"] + by)[0], gradient, held, seed)


def near(size, seed, spread):
    """Two rows of logprobs, and a third."""
    generator = torch.Generator().manual_seed(seed)
    return [-1.5 + spread * torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("form", ["plain", "straight", "importance"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@settings(max_examples=3)
@given(seed=SEEDS)
def test_kl_estimators(estimator, form, seed):
    """The straight-through form is k2 in its gradient: differences with the rest held find that."""
    lp, ref, old = near(6, seed, 0.8)
    functions = {
        "plain": lambda now: kl.kl_estimate(estimator, now, ref),
        "straight": lambda now: kl.straight_through_kl(estimator, now, ref),
        "importance": lambda now: kl.importance_kl(estimator, now, ref, old),
    }
    leaf = lp.clone().requires_grad_()
    held = Held()
    with held.recorded():
        value = functions[form](leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert_slopes(lambda by: functions[form](lp + by).sum(), gradient, held, seed)
    if form == "straight":
        torch.testing.assert_close(gradient, lp - ref)


@pytest.mark.parametrize("clip", [None, 0.2])
@settings(max_examples=6)
@given(seed=SEEDS)
def test_value_loss(clip, seed):
    """On both branches: at a clip of 0.2 some values have left it."""
    values, old, returns = near(12, seed, 0.4)
    leaf = values.clone().requires_grad_()
    held = Held()
    with held.recorded():
        found, is_clipped = value_loss(leaf, old, returns, clip=clip)
    if clip is not None:
        held_value = old + (values - old).clamp(-clip, clip)
        gaps = [(values - old).abs() - clip, (values - returns).square() - (held_value - returns).square()]
        inside = (values - old).abs() < clip
        assume(bool((gaps[0].abs() > FAR_ENOUGH).all()) and bool((inside | (gaps[1].abs() > FAR_ENOUGH)).all()))
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert (gradient[is_clipped] == 0).all()
    assert_slopes(lambda by: value_loss(values + by, old, returns, clip=clip)[0].sum(), gradient, held, seed)
