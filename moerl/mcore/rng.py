"""Every random number generator of a rank, as plain JSON and tensors."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.mcore.parallel import reseed, rng_tracker_states, set_rng_tracker_states


def rng_state(tensors: dict[str, Tensor]) -> Any:
    """The state of this rank as JSON; its tensors go to `tensors` by name."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(kind), words, int(position), int(has_gauss), float(gauss)),
        "tracker": rng_tracker_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return _encode(state, "rng", tensors)


def set_rng_state(encoded: Any, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `rng_state` returned."""
    state = _decode(encoded, tensors)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    set_rng_tracker_states(dict(state["tracker"]))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_from(encoded: Any, tensors: Mapping[str, Tensor]) -> int:
    """Seed everything, alike on every rank that must draw alike, from a saved state; returns the seed."""
    seed = zlib.crc32(_decode(encoded, tensors)["torch"].numpy().tobytes()) & 0x7FFFFFFF
    random.seed(seed)
    np.random.seed(seed)
    reseed(seed)
    return seed


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Plain JSON for `value`, integer keys and tuples kept apart; its tensors go to `tensors` by path."""
    if isinstance(value, Tensor):
        tensors[path] = value.clone()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"map": [[key, _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    assert value is None or isinstance(value, bool | int | float | str), (
        f"{path}: {type(value).__name__} cannot be saved"
    )
    return value


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "tensor":
        return tensors[content]
    if kind == "map":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
