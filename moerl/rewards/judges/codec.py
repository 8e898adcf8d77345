"""Python values as JSON and back: scorers look at tuples and at keys that are no strings, and JSON has neither."""

from __future__ import annotations

from typing import Any

_TUPLE, _PAIRS = "__tuple__", "__pairs__"


def to_plain(value: Any) -> Any:
    """JSON types only: tuples and mappings with other keys are tagged, numpy scalars are numbers, the rest is text."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {str(key): to_plain(item) for key, item in value.items()}
        return {_PAIRS: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(item) for item in value]}
    if isinstance(value, list | set | frozenset):
        return [to_plain(item) for item in value]
    if value is None or type(value) in (str, bool, int, float):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def from_plain(value: Any) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(from_plain(item) for item in value[_TUPLE])
    if value.keys() == {_PAIRS}:
        return {from_plain(key): from_plain(item) for key, item in value[_PAIRS]}
    return {key: from_plain(item) for key, item in value.items()}
