"""Arguments of plugins: typed once and remembered, without one caller seeing what another did with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from moerl.errors import ConfigError
from moerl.registry import build_dataclass


@dataclass(frozen=True)
class Arguments:
    """Of a plugin."""

    share: float = 0.5
    words: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def test_what_one_caller_gets_no_other_changes():
    first = build_dataclass(Arguments, {"words": ["a"]}, where="x")
    first.words.append("b")
    first.more["c"] = 1
    assert build_dataclass(Arguments, {"words": ["a"]}, where="x") == Arguments(words=["a"])


def test_arguments_that_are_equal_but_of_another_type_are_not_the_same():
    kinds = [type(build_dataclass(Arguments, {"more": {"n": n}}, where="x").more["n"]) for n in (1, True, 1.0)]
    assert kinds == [int, bool, float]


@pytest.mark.parametrize("value", [float("nan"), ("a", "b"), {1: "a"}, b"raw"])
def test_what_json_does_not_hold_is_not_remembered(value):
    found = build_dataclass(Arguments, {"more": {"n": value}}, where="x").more["n"]
    assert repr(found) == repr(value)


def test_a_fault_names_the_place_that_asked():
    for where in ("algorithm.trust (clip)", "algorithm.kl (k1)", "algorithm.trust (clip)"):
        with pytest.raises(ConfigError, match=where.replace("(", r"\(").replace(")", r"\)")):
            build_dataclass(Arguments, {"share": "half"}, where=where)
    with pytest.raises(ConfigError, match=r"x: unknown key 'shares'; did you mean 'share'\?"):
        build_dataclass(Arguments, {"shares": 1}, where="x")
