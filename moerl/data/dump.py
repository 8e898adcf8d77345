"""A `StepBatch` as one `.npz` file without pickle: for NaN dumps, `inspect_batch` and `replay_step`.

Layout. `header`: uint8 [bytes], UTF-8 JSON with

    format                  1
    policy_version, num_samples, num_tokens, num_live_tokens, num_score_minibatches
    micro_batches           [minibatch][micro-batch] -> {"sample_ids": [...], "constants": {...}, "fields": [...]}
    extra                   what the caller added (any JSON)

and for micro-batch j of minibatch i, one array `m<i>.<j>.<field>` for each of its `fields`, with the shapes that
`moerl.types.MicroBatch` states; dtypes int64, int32 (`cu_seqlens`), uint8 or int16 (`routes`, `old_routes`), bool,
float32 (bfloat16 tensors are widened), float64. `weights.<term>` is stored once per distinct tensor: a term that is not
listed shares `weights.policy`. `support.ids` and `support.offsets` are there only where the support is.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.errors import DataError
from moerl.types import MicroBatch, PackedSupport, StepBatch, TokenWeights

FORMAT = 1
_TERMS = tuple(f.name for f in fields(TokenWeights))
_COMPOSITE = ("sample_ids", "weights", "support", "constants")
_TENSORS = tuple(f.name for f in fields(MicroBatch) if f.name not in _COMPOSITE)


def save_step_batch(path: str | Path, batch: StepBatch, extra_json: Mapping[str, Any] | None = None) -> Path:
    """Write `batch` whole or not at all (to a temporary file beside it, then renamed); returns the path.

    `extra_json` is any JSON the reader may want: step, configuration, reason of the dump.
    """
    path = Path(path)
    arrays: dict[str, np.ndarray] = {}
    described = [
        [_describe(micro, f"m{i}.{j}", arrays) for j, micro in enumerate(minibatch)]
        for i, minibatch in enumerate(batch.minibatches)
    ]
    header = {
        "format": FORMAT,
        "policy_version": batch.policy_version,
        "num_samples": batch.num_samples,
        "num_tokens": batch.num_tokens,
        "num_live_tokens": batch.num_live_tokens,
        "num_score_minibatches": batch.num_score_minibatches,
        "micro_batches": described,
        "extra": dict(extra_json or {}),
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]  # every key is an array's name
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def load_step_batch(path: str | Path, device: torch.device | str = "cpu") -> StepBatch:
    """The batch that `save_step_batch` wrote.

    Raises:
        DataError: no such file, not a dump, damaged, or of another format.
    """
    arrays, header = _open(path)
    try:
        minibatches = tuple(
            tuple(_restore(about, f"m{i}.{j}", arrays, device) for j, about in enumerate(minibatch))
            for i, minibatch in enumerate(header["micro_batches"])
        )
    except KeyError as error:
        raise DataError(f"{path}: the dump lacks {error}; it is damaged, dump the batch again") from error
    counts = {f.name: header[f.name] for f in fields(StepBatch) if f.name != "minibatches"}
    return StepBatch(minibatches=minibatches, **counts)


def load_extra(path: str | Path) -> dict[str, Any]:
    """The caller's own JSON of a dump. Raises `DataError` like `load_step_batch`."""
    return _open(path)[1]["extra"]


def _open(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    if not Path(path).is_file():
        raise DataError(f"{path}: there is no such file; give a batch that moerl dumped")
    try:
        with zipfile.ZipFile(path) as archive:  # numpy takes any other file for a pickle and says so
            archive.namelist()
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop("header").tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = "pickled objects, which could run code" if "allow_pickle" in str(error) else str(error)
        raise DataError(f"{path}: is not a whole batch dump ({reason}); give a file that moerl dumped") from error
    if header.get("format") != FORMAT:
        raise DataError(
            f"{path}: dump format {header.get('format')}, this moerl reads {FORMAT}; use the version that wrote it"
        )
    return arrays, header


def _describe(micro: MicroBatch, prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    for name in _TENSORS:
        value = getattr(micro, name)
        if value is not None:
            tensors[name] = value
    tensors["weights.policy"] = micro.weights.policy
    for term in _TERMS:
        weight = getattr(micro.weights, term)
        if weight is not micro.weights.policy:
            tensors[f"weights.{term}"] = weight
    if micro.support is not None:
        tensors |= {"support.ids": micro.support.ids, "support.offsets": micro.support.offsets}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu()
        arrays[f"{prefix}.{name}"] = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return {"sample_ids": list(micro.sample_ids), "constants": dict(micro.constants), "fields": list(tensors)}


def _restore(
    about: Mapping[str, Any], prefix: str, arrays: Mapping[str, np.ndarray], device: torch.device | str
) -> MicroBatch:
    tensors = {name: torch.from_numpy(arrays[f"{prefix}.{name}"]).to(device) for name in about["fields"]}
    shared = tensors["weights.policy"]
    weights = TokenWeights(**{term: tensors.get(f"weights.{term}", shared) for term in _TERMS})
    support = None
    if "support.ids" in tensors:
        support = PackedSupport(tensors["support.ids"], tensors["support.offsets"])
    return MicroBatch(
        sample_ids=tuple(about["sample_ids"]),
        weights=weights,
        support=support,
        constants=about["constants"],
        **{name: tensors[name] for name in _TENSORS if name in tensors},
    )
