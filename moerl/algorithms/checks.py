"""Checks of plugin arguments, each with one message; torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection

from moerl.errors import ConfigError


def check_choice(field: str, value: str, allowed: Collection[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{field} is {value!r}; choose one of {', '.join(sorted(allowed))}")


def check_range(field: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise `ConfigError` unless low <= value <= high (NaN is refused)."""
    if not low <= value <= high:
        raise ConfigError(f"{field} is {value!r}; set it between {low:g} and {high:g}")


def check_above(field: str, value: float, low: float) -> None:
    """Raise `ConfigError` unless value > low (NaN is refused)."""
    if not value > low:
        raise ConfigError(f"{field} is {value!r}; set it above {low:g}")


def check_tokens(field: str, value: int, source: str) -> None:
    """Raise `ConfigError` unless `value` is a positive number of tokens; `source` says what it usually is."""
    if value <= 0:
        raise ConfigError(f"{field} is {value!r}; set it to a positive number of tokens, usually {source}")
