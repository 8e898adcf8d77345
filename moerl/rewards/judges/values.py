"""Plain Python values as JSON and back, each type kept: what passes between a stranger's program and who judges it.

Scalars are themselves; containers are `[word, items]`. A value of any other type, a subclass with an equality of its
own among them, does not pass.
"""

from __future__ import annotations

from typing import Any

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAX_DEPTH = 64


def encode(value: Any, depth: int = 0) -> Any:
    """Raises TypeError for what is no plain value, or is nested too deeply."""
    if depth > _MAX_DEPTH:
        raise TypeError("the value is nested too deeply")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is dict:
        return ["dict", [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]]
    for word, kind in _SEQUENCES.items():
        if type(value) is kind:
            return [word, [encode(item, depth + 1) for item in value]]
    raise TypeError(f"a value of type {type(value).__name__} cannot be judged; give plain Python values")


def decode(value: Any, depth: int = 0) -> Any:
    """What `encode` was given. Raises TypeError or ValueError for anything else."""
    if depth > _MAX_DEPTH:
        raise TypeError("the value is nested too deeply")
    if not isinstance(value, list):
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError("no encoded value")
    word, items = value
    if word == "dict":
        return {decode(key, depth + 1): decode(item, depth + 1) for key, item in items}
    if word not in _SEQUENCES:
        raise TypeError("no encoded value")
    return _SEQUENCES[word](decode(item, depth + 1) for item in items)
