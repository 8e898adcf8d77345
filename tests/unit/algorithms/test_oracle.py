"""Loss and gradient of every method equal the formulas of the oracle, on random batches, in float64 and float32."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_batches import SPREADS, make_batch, per_token_advantages, tensors, with_faults
from oracle_methods import BUDGET, CASES, COVERED, METHODS, Method, gradient, loss
from oracle_numbers import margin
from oracle_product import case

import moerl
from moerl.algorithms import registries
from moerl.algorithms.presets import PRESETS

FLOAT_PRESETS = sorted(set(METHODS) - {"group_dpo"})  # of pairs the advantages are made, not given: see credit
NEAR_A_KINK = 1e-5
"""Relative distance to a kink within which float32 may choose the other side."""


def method_of(name) -> Method:
    return METHODS[name] if name in METHODS else CASES[name][1]


def test_every_preset_has_an_oracle():
    missing = sorted(set(PRESETS) - set(METHODS))
    assert not missing, f"presets without an independent definition: {missing}; add them to oracle_methods.METHODS"
    assert not set(METHODS) - set(PRESETS), "the oracle defines methods that are no presets"


@pytest.mark.parametrize("axis", COVERED)
def test_every_part_of_the_objective_has_an_oracle(axis):
    registry = {
        "trust": registries.trust_regions,
        "correction": registries.corrections,
        "token_weight": registries.token_weights,
        "schedule": registries.schedules,
        "objective": registries.objectives,
    }[axis]
    own = {name for name in registry.names() if registry.get(name).target.__module__.startswith("moerl.")}
    closed_forms = {name for name in own if (Path(__file__).parent / f"test_{name}.py").exists()}
    missing = sorted(own - COVERED[axis] - closed_forms)
    assert not missing, f"{axis} with neither a formula in oracle_terms nor a test_<name>.py here: {missing}"


def compare(name, batch, dtype, *, cancels=False):
    """`cancels`: log-ratios of thousands that cancel in a mean leave float32 three digits."""
    method = method_of(name)
    margin()
    wanted_loss = float(loss(method, batch).real)
    wanted = torch.tensor([x for row in gradient(method, batch) for x in row], dtype=torch.float64)
    distance = margin()
    if dtype == torch.float32 and distance < NEAR_A_KINK:
        return
    found = case(name)(**tensors(batch, dtype))
    assert found.gradient.dtype == dtype
    size = float(found.token_loss.detach().double().abs().sum())
    largest = float(wanted.abs().max())
    rtol, floor = (1e-9, 1e-12) if dtype == torch.float64 else (1e-3, 2e-5)
    assert float(found.loss.detach()) == pytest.approx(
        wanted_loss, abs=(1e-10 if rtol < 1e-6 else 1e-3 if cancels else 2e-5) * (size + 1e-3)
    )
    torch.testing.assert_close(found.gradient.double(), wanted, rtol=rtol, atol=floor * (largest + 1e-3))


@pytest.mark.parametrize("name", [*FLOAT_PRESETS, *CASES])
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(SPREADS)))
def test_loss_and_gradient(name, seed, kind):
    batch = make_batch(f"{name} {seed}", kind)
    if not method_of(name).constant:
        batch = per_token_advantages(batch, seed)
    compare(name, batch, torch.float64)


@pytest.mark.parametrize("name", [*FLOAT_PRESETS, *CASES])
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(SPREADS)))
def test_loss_and_gradient_in_float32(name, seed, kind):
    compare(name, make_batch(f"{name} {seed}", kind, torch.float32), torch.float32, cancels=kind == "extreme")


@pytest.mark.parametrize("name", [name for name in (*FLOAT_PRESETS, *CASES) if "normalized" not in name])
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_tokens_with_infinite_or_missing_logprobs_drop_out(name, seed):
    compare(name, with_faults(make_batch(f"{name} {seed}", "wild"), seed), torch.float64)


def test_the_oracle_knows_where_it_is_not_smooth():
    margin()
    loss(METHODS["grpo"], make_batch(1, "calm"))
    assert 0 < margin() < math.inf
    assert margin() == math.inf


@pytest.mark.parametrize("name", ["grpo", "scalerl", "dr_grpo"])
def test_the_methods_under_test_are_those_that_a_name_gives(name):
    assert case(name).section == dataclasses.replace(moerl.objective(name, max_new_tokens=BUDGET).section, preset=None)
