"""The calculator's arithmetic: equal to Python's own where it answers, and harmless where it does not."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.envs.tools.arithmetic import evaluate


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map("".join).map("({})".format),
        max_leaves=12,
    )
)
def test_whole_numbers_are_exact(text):
    assert evaluate(text) == {"value": str(eval(text))}


@given(st.integers(-999, 999), st.integers(-999, 999).filter(bool))
def test_division(left, right):
    value = float(evaluate(f"{left}/{right}")["value"])
    assert value == pytest.approx(float(Fraction(left, right)), rel=1e-9)
    assert evaluate(f"{left}//{right}") == {"value": str(left // right)}
    assert evaluate(f"{left}%{right}") == {"value": str(left % right)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6/2", "3"),
        ("0.1+0.2", "0.3"),
        ("2^10", "1024"),
        ("2**-1", "0.5"),
        (" (3 + 4)×2 ", "14"),
        ("-(-3)", "3"),
        ("1e20*1.0", "1e+20"),
        ("7÷2", "3.5"),
        ("−3", "-3"),
        ("2**0.5", "1.414213562"),
    ],
)
def test_as_a_person_writes_it(text, value):
    assert evaluate(text) == {"value": value}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("2.0**10000", "(34, 'Numerical result out of range')"),
        ("1e308*10", "too large"),
        ("(-8)**0.5", "not a real number"),
        ("1<2", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("'a'*9", "only numbers"),
        ("True+1", "only numbers"),
        ("[0]*9", "only numbers"),
        ("x", "only numbers"),
        ("1j", "only numbers"),
        ("1 2", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("\0", "not an arithmetic expression"),
        ("1" * 501, "longer than 500 characters"),
        ("9" * 499 + "**2", "longer than"),
    ],
)
def test_what_has_no_value_says_why(text, error):
    found = evaluate(text)
    assert list(found) == ["error"]
    assert error in found["error"]


@pytest.mark.parametrize("text", ["(" * 250 + "1" + ")" * 249, "-" * 499 + "1", "1+" * 249 + "1", "2**" * 160 + "2"])
def test_depth_never_raises(text):
    assert set(evaluate(text)) <= {"value", "error"}
