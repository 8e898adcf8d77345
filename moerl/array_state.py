"""State of JSON values and numpy arrays: JSON text, and one safetensors file for the arrays. Nothing is a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from moerl.errors import CheckpointError

PLACE = "$array"
"""Key of what stands in the text for an array: `{"$array": name in the file}`."""


def split_arrays(state: Mapping[str, Any]) -> tuple[str, dict[str, np.ndarray]]:
    """(JSON text, the arrays by name) of nested dictionaries and lists; floats must be finite outside of arrays."""
    arrays: dict[str, np.ndarray] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"{len(arrays):06d}"
            arrays[name] = value
            return {PLACE: name}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    return json.dumps(plain(state), allow_nan=False), arrays


def join_arrays(text: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What `split_arrays` was given, tuples as lists.

    Raises:
        CheckpointError: an array is missing.
    """

    def whole(value: dict[str, Any]) -> Any:
        if value.keys() != {PLACE}:
            return value
        if value[PLACE] not in arrays:
            raise CheckpointError(f"the state lacks the array {value[PLACE]!r}; use another checkpoint")
        return arrays[value[PLACE]]

    return json.loads(text, object_hook=whole)


def save_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write them to `path`; no file where there are none."""
    if arrays:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what `save_arrays` wrote; none where there is no file.

    Raises:
        CheckpointError: damaged.
    """
    if not path.is_file():
        return {}
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint") from error
