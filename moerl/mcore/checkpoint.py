"""Save and restore the learner bit for bit: weights, optimizer, schedule position, every RNG; no pickle.

Each rank writes its own part, `rank_00000.safetensors` and `rank_00000.json`, and reads it back under the same layout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moerl.errors import CheckpointError, NumericsError
from moerl.mcore.parallel import ParallelState, rng_tracker_states, set_rng_tracker_states
from moerl.models.rules import shorten

FORMAT = 1


def save_state(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Any,
    counters: Mapping[str, Any],
    parallel: ParallelState,
    reference: Mapping[str, Tensor] | None = None,
) -> None:
    """Write this rank's part into `folder`, which exists; `counters` is plain JSON, `reference` weights that moved.

    Raises:
        NumericsError: a weight of any rank is not finite; nothing was written.
    """
    moved = {f"reference {name}": tensor for name, tensor in (reference or {}).items()}
    _refuse_not_finite({**weights, **moved}, parallel)
    tensors: dict[str, Tensor] = {}
    state = {
        "format": FORMAT,
        "counters": dict(counters),
        "layout": _layout(parallel),
        "weights": _encode(dict(weights), "model", tensors),
        "optimizer": _encode(optimizer.state_dict(), "optimizer", tensors),
        "rng": _encode(_rng_state(), "rng", tensors),
    }
    if reference is not None:
        state["reference"] = _encode(dict(reference), "reference", tensors)
    tensor_file, json_file = _files(folder, parallel.rank)
    save_file({name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}, tensor_file)
    json_file.write_text(json.dumps(state))


def load_state(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Any,
    parallel: ParallelState,
    reference: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Restore this rank's part into `weights`, `optimizer` and `reference`; returns the counters.

    Raises:
        CheckpointError: a missing or damaged file, another layout, other weights; nothing was changed then.
    """
    moved = () if reference is None else ("reference",)
    state, saved = _read_parts(folder, ("weights", "optimizer", "rng", *moved), parallel)
    _check_weights(folder, saved["weights"], weights)
    if reference is not None:
        _check_weights(folder, saved["reference"], reference)
        _fill(reference, saved["reference"])
    _fill(weights, saved["weights"])
    optimizer.load_state_dict(saved["optimizer"])
    _set_rng_state(saved["rng"])
    return state["counters"]


def load_weights(folder: Path, *, weights: Mapping[str, Tensor], parallel: ParallelState) -> None:
    """Restore the weights alone, to start another run from them.

    Raises:
        CheckpointError: as `load_state`.
    """
    _, saved = _read_parts(folder, ("weights",), parallel)
    _check_weights(folder, saved["weights"], weights)
    _fill(weights, saved["weights"])


def _read_parts(folder: Path, parts: Sequence[str], parallel: ParallelState) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's JSON, and the named parts of it with their tensors."""
    tensor_file, json_file = _files(folder, parallel.rank)
    state = _read_json(json_file)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{json_file}: format is {state.get('format')!r}, this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    if state["layout"] != _layout(parallel):
        raise CheckpointError(
            f"{folder} was written under the layout {state['layout']}, this run has {_layout(parallel)}; "
            "start with the same parallel section, or from exported weights"
        )
    tensors = _read_tensors(tensor_file)
    try:
        return state, {part: _decode(state[part], tensors) for part in parts}
    except KeyError as error:
        raise CheckpointError(
            f"{tensor_file} lacks {error}, which {json_file.name} lists; the checkpoint is damaged"
        ) from error


def _refuse_not_finite(weights: Mapping[str, Tensor], parallel: ParallelState) -> None:
    """A step is checked by its loss and gradient; an update may still overflow the format of the weights."""
    finite = {name: torch.isfinite(tensor).all() for name, tensor in weights.items()}
    if not parallel.all_true(torch.stack(list(finite.values())).all()):
        broken = shorten(sorted(name for name, is_finite in finite.items() if not bool(is_finite)))
        raise NumericsError(
            f"weights are not finite ({broken or 'on another rank'}), so no checkpoint was written and earlier ones "
            "are untouched; go on from the last one with a smaller optim.lr or optim.clip_grad_norm"
        )


@torch.no_grad()
def _fill(weights: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        tensor.copy_(saved[name])


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank_{rank:05d}.safetensors", folder / f"rank_{rank:05d}.json"


def _layout(parallel: ParallelState) -> dict[str, int]:
    axes = {
        "dp": parallel.dp,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "ep": parallel.ep,
        "etp": parallel.etp,
    }
    return {**{name: axis.size for name, axis in axes.items()}, "virtual_pipeline": parallel.virtual_pipeline or 0}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; the checkpoint has no part for this rank") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use an earlier checkpoint") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 not a mapping
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; the checkpoint has no part for this rank") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use an earlier checkpoint") from error


def _check_weights(folder: Path, saved: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    if saved.keys() != weights.keys():
        odd = sorted(saved.keys() ^ weights.keys())
        raise CheckpointError(f"{folder} belongs to another model: it differs in {shorten(odd)}; check model.path")
    for name, tensor in weights.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{folder}: {name} is {saved[name].dtype} {list(saved[name].shape)}, the model has {tensor.dtype} "
                f"{list(tensor.shape)}; check model.path and precision.params"
            )


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Plain JSON for `value`, integer keys and tuples kept apart; its tensors go to `tensors` by path."""
    if isinstance(value, Tensor):
        tensors[path] = value
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


def _rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "tracker": rng_tracker_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    set_rng_tracker_states(dict(state["tracker"]))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
