"""The algorithm section as plain values, read by path; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moerl.config.schema import AlgorithmSection


class Axes:
    """The algorithm section with the schema's defaults where `values` is silent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = asdict(AlgorithmSection())

    def __getitem__(self, path: str) -> Any:
        return look_up(self._values, path, look_up(self._defaults, path, None))

    def is_moved(self, path: str) -> bool:
        """Whether the value, or a plugin's node, is another than the schema's."""
        default = look_up(self._defaults, path, None)
        if isinstance(default, Mapping):
            return self.name(path) != default.get("name")
        return self[path] != default

    def name(self, axis: str) -> str:
        """Name of the plugin at `axis`; the bare name is short for a node."""
        node = look_up(self._values, axis, look_up(self._defaults, axis, {}))
        return str(node if isinstance(node, str) else node.get("name", ""))

    def argument(self, axis: str, key: str, default: Any) -> Any:
        """One argument of the plugin at `axis`."""
        node = look_up(self._values, axis, look_up(self._defaults, axis, {}))
        return default if isinstance(node, str) else node.get(key, default)


def look_up(values: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value at a dotted path of nested mappings."""
    node: Any = values
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return default
        node = node[key]
    return node
