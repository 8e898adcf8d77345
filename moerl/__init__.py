"""moerl: reinforcement learning of mixture-of-experts language models on Megatron-Core.

`moerl.objective` and `moerl.methods` are the mathematics alone (`moerl.api`); torch is imported when one is first read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moerl.api import methods as methods
    from moerl.api import objective as objective

__version__ = "0.1.0"

_PUBLIC = ("methods", "objective")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module("moerl.api"), name)
    raise AttributeError(f"module 'moerl' has no attribute {name!r}")
