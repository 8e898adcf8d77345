"""Passes by numpy and by torch: the same numbers, by type, with what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from moerl.algorithms import elementwise

VALUES = [-math.inf, -2.0, -0.0, 0.5, 1.0, 3.0, math.inf, math.nan]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=str)
def values(request):
    return torch.tensor(VALUES, dtype=request.param)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert not found.requires_grad


def test_numpy_is_for_what_it_knows(values):
    assert elementwise.suits_numpy(values) == (values.dtype in (torch.float32, torch.float64))
    assert not elementwise.suits_numpy(values.to("meta"))


def test_exp_with_its_gradient(values):
    found, wanted = values.clone().requires_grad_(), values.clone().requires_grad_()
    raised = elementwise.exp(found)
    torch.testing.assert_close(raised, wanted.exp(), equal_nan=True)
    same(torch.autograd.grad(raised.sum(), found)[0], torch.autograd.grad(wanted.exp().sum(), wanted)[0])
    same(elementwise.exp(values), values.exp())


def test_comparisons(values):
    leaf = values.clone().requires_grad_()
    same(elementwise.is_above(leaf, 0.5), values > 0.5)
    same(elementwise.is_above(leaf, leaf.flip(0)), values > values.flip(0))
    same(elementwise.is_below(leaf, 0.5), values < 0.5)


def test_choices(values):
    flags = torch.tensor([True, False] * 4)
    same(elementwise.choose(flags, values, values.flip(0)), torch.where(flags, values, values.flip(0)))
    finite = values.nan_to_num(0.0, 1.0, -1.0).requires_grad_()
    same(elementwise.zero_where(flags, finite), torch.where(flags, 0, finite.detach()))


def test_totals(values):
    assert math.isnan(elementwise.total(values))
    assert elementwise.total(values[1:6].clone().requires_grad_()) == 2.5
    assert elementwise.total(values > 0) == 4
