"""The checksum of named tensors: name, dtype, shape and every byte; trainer and engine must agree on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from moerl.errors import WeightSyncError
from moerl.types import WeightBucket


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 (hex) of every tensor's name, dtype, shape and bytes, in the order given; the device does not matter."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().reshape(-1).contiguous().cpu()
        # numpy has no bfloat16 or float8, bytes are the same everywhere
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def verify_bucket(bucket: WeightBucket) -> None:
    """For engines: check that a bucket arrived as it was sent; one without a checksum has not travelled yet.

    Raises:
        WeightSyncError: the checksum differs.
    """
    if bucket.checksum is None:
        return
    seen = checksum(bucket.tensors)
    if seen != bucket.checksum:
        names = [name for name, _ in bucket.tensors]
        span = f"{names[0]!r} to {names[-1]!r}" if names else "no tensors"
        raise WeightSyncError(
            f"weight bucket of version {bucket.version} ({len(names)} tensors, {span}) has checksum {seen[:12]} where "
            f"the trainer sent {bucket.checksum[:12]}; it was damaged on the way, publish again"
        )
