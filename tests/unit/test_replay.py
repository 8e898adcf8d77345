"""compare_gradients: the worst tensor first, whatever the numbers are, and never two tensors that do not belong."""

from __future__ import annotations

import math

import pytest
import torch

from moerl.errors import DataError
from moerl.replay import GradientGap, compare_gradients


def gradients(**values):
    return {name: torch.tensor(value) for name, value in values.items()}


def test_equal_gradients_have_no_gap():
    grads = gradients(a=[1.0, -2.0], b=[[0.0]])
    gaps = compare_gradients(grads, grads)
    assert [(gap.difference, gap.relative) for gap in gaps] == [(0.0, 0.0)] * 2
    assert {gap.name: gap.largest for gap in gaps} == {"a": 2.0, "b": 0.0}


def test_the_widest_relative_gap_comes_first():
    oracle = gradients(large=[100.0, 0.0], small=[0.0, -0.01], exact=[1.0, 1.0])
    learner = gradients(large=[100.0, 1.0], small=[0.005, -0.01], exact=[1.0, 1.0])
    gaps = compare_gradients(oracle, learner)
    assert [gap.name for gap in gaps] == ["small", "large", "exact"]
    assert [gap.relative for gap in gaps] == pytest.approx([0.5, 0.01, 0.0], rel=1e-6)
    assert [gap.difference for gap in gaps] == pytest.approx([0.005, 1.0, 0.0])


def test_a_gradient_where_the_oracle_has_none_is_an_infinite_gap():
    (gap,) = compare_gradients(gradients(a=[0.0, 0.0]), gradients(a=[0.0, 1e-9]))
    assert gap.relative == math.inf


@pytest.mark.parametrize("side", ["oracle", "learner", "learner_of_zeros", "both"])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_not_a_number_comes_first_and_passes_no_tolerance(side, position):
    names = ["a", "b", "c", "d"]
    oracle = {name: torch.tensor([1.0, 2.0]) for name in names}
    learner = {name: torch.tensor([1.0, 2.0 + 0.5 * i]) for i, name in enumerate(names)}
    odd = names[position]
    if side in ("oracle", "both"):
        oracle[odd] = torch.tensor([math.nan, 2.0])
    if side != "oracle":
        learner[odd] = torch.tensor([math.nan, 2.0])
    if side == "learner_of_zeros":
        oracle[odd] = torch.zeros(2)
    gaps = compare_gradients(oracle, learner)
    assert gaps[0].name == odd
    assert not gaps[0].relative <= 1e30
    rest = [gap.relative for gap in gaps[1:]]
    assert rest == sorted(rest, reverse=True)


@pytest.mark.parametrize("infinite", [1, 2, 3])
def test_infinities_pass_no_tolerance(infinite):
    one, two = torch.tensor([math.inf, 1.0]), torch.tensor([1.0, 1.0])
    (gap,) = compare_gradients({"a": one if infinite & 1 else two}, {"a": one if infinite & 2 else two})
    assert not gap.relative <= 1e30


@pytest.mark.parametrize(("left", "right"), [("ab", "a"), ("a", "ab"), ("ab", "ac")])
def test_other_names_are_refused_and_named(left, right):
    odd = sorted(set(left) ^ set(right))
    with pytest.raises(DataError) as caught:
        compare_gradients(gradients(**{key: [1.0] for key in left}), gradients(**{key: [1.0] for key in right}))
    assert f"not the same tensors: {', '.join(odd)}; is it the same model?" in str(caught.value)


def test_of_many_other_names_only_some_are_listed():
    many = gradients(**{f"layer_{i:02d}": [1.0] for i in range(40)})
    with pytest.raises(DataError) as caught:
        compare_gradients(many, {})
    assert "layer_04" in str(caught.value)
    assert "layer_05" not in str(caught.value)


def test_other_shapes_are_refused_though_they_would_broadcast():
    with pytest.raises(DataError, match=r"gradient of a is \[2, 1\] by the oracle and \[2\] by the learner"):
        compare_gradients({"a": torch.ones(2, 1)}, {"a": torch.ones(2)})


def test_the_gap_of_a_single_number():
    assert GradientGap("a", 2.0, 0.5).relative == 0.25
