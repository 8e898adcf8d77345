"""Where prompts come from: each file registers one function `(config) -> list[Row]` under a name."""

from __future__ import annotations

from typing import Any

from moerl.registry import Registry

prompt_sources: Registry[Any] = Registry("prompt source", "moerl.data.sources")
