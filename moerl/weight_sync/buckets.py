"""A stream of named tensors -> weight buckets of bounded bytes, the last one marked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import Tensor

from moerl.checksums import checksum
from moerl.errors import WeightSyncError
from moerl.types import WeightBucket


def make_buckets(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    version: int,
    bucket_bytes: int,
    expected_names: Collection[str] | None = None,
    is_summed: bool = True,
) -> Iterator[WeightBucket]:
    """Cut the stream, in its order, into buckets of at most `bucket_bytes`; a tensor above that travels alone.

    Holds one bucket at a time. The last bucket is made only once the stream has ended and its names are known to be
    right, so a receiver that commits on `is_last` never commits a stream that was cut short. Tensors are not copied.

    Args:
        named_tensors: Hugging Face names and whole tensors.
        version: the policy version that the last bucket raises the engine to.
        bucket_bytes: at least 1.
        expected_names: the exact set of names that the engines need; None does not check.
        is_summed: give each bucket its checksum.

    Raises:
        WeightSyncError: no tensors, a name came twice, or the names are not the expected ones (missing and unexpected).
    """
    pending: list[tuple[str, Tensor]] = []
    pending_bytes = 0
    seen: set[str] = set()
    for name, tensor in named_tensors:
        if name in seen:
            raise WeightSyncError(
                f"weight {name!r} came twice in the update to version {version}; export each name once"
            )
        seen.add(name)
        if pending and pending_bytes + tensor.nbytes > bucket_bytes:
            yield WeightBucket(version, tuple(pending), False, checksum(pending) if is_summed else None)
            pending, pending_bytes = [], 0
        pending.append((name, tensor))
        pending_bytes += tensor.nbytes
    if not pending:
        raise WeightSyncError(f"the update to version {version} has no tensors; export the policy's weights")
    if expected_names is not None:
        _check_names(seen, frozenset(expected_names), version)
    yield WeightBucket(version, tuple(pending), True, checksum(pending) if is_summed else None)


def _check_names(seen: set[str], expected: frozenset[str], version: int) -> None:
    missing, unexpected = sorted(expected - seen), sorted(seen - expected)
    if missing or unexpected:
        raise WeightSyncError(
            f"the update to version {version} does not have the engine's names: missing {_listed(missing)}; unexpected "
            f"{_listed(unexpected)}; trainer and engine must be built from one config.json"
        )


def _listed(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + rest) or "none"
