"""What is told of two tensors that differ, whatever their size."""

from __future__ import annotations

import pytest
import torch

from moerl.convert import compare
from moerl.convert.compare import _difference
from moerl.models.hf_folder import InMemory


def told(a: torch.Tensor, b: torch.Tensor) -> str | None:
    found = _difference("x", InMemory({"x": a}), InMemory({"x": b}))
    return None if found is None else found.what


@pytest.mark.parametrize("strip", [1, 4, 5, 100])
def test_strips_tell_what_the_whole_tells(monkeypatch, strip):
    monkeypatch.setattr(compare, "STRIP_VALUES", strip)
    a = torch.arange(12.0).reshape(3, 4)
    b = a.clone()
    b[0, 1], b[2, 3] = 1.5, 14
    assert told(a, b) == "2 of 12 values differ, by up to 3"
    b[1, 1] = torch.nan
    assert told(a, b) == "3 of 12 values differ, by up to inf"
    assert told(a, a.double()) == "float32 and float64: equal values"
    assert told(torch.zeros(6), -torch.zeros(6)) == "equal values, other bits (zeros or NaNs)"


def test_no_more_than_a_strip_is_widened(monkeypatch):
    monkeypatch.setattr(compare, "STRIP_VALUES", 10)
    widened, double = [], torch.Tensor.double

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        widened.append(tensor.numel())
        return double(tensor)

    monkeypatch.setattr(torch.Tensor, "double", noted)
    assert told(torch.zeros(5, 7), torch.ones(5, 7)) == "35 of 35 values differ, by up to 1"
    assert max(widened) == 10
