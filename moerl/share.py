"""The leader's samples on every rank: what packing and credit read goes to all, arrays only to who trains on them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import numpy as np

from moerl.errors import DataError
from moerl.protocols import Team
from moerl.types import LocalArray, PackPlan, Sample, Support, TopLogprobs

_SCALARS = ("sample_id", "group_id", "prompt_id", "reward", "temperature", "shaping", "response_length")
_DTYPES = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64"})
"""What an array from another rank may be made of."""
_MAX_UINT8_EXPERTS = 256


class SampleShare:
    """Samples of a step, from the leader to its team. With one process nothing is copied."""

    def __init__(self, team: Team) -> None:
        """Over the ranks of `team`."""
        self._team = team

    def outline(self, samples: Sequence[Sample]) -> list[Sample]:
        """The leader's `samples` on every rank; elsewhere without their arrays, save `loss_mask` and `components`.

        The per-token arrays that every sample has keep their length there and hold nothing; the others are None.
        """
        if self._team.size == 1:
            return list(samples)
        self._team.phase("share")
        received = self._team.spread(_outlines(samples) if self._team.is_leader else None)
        return list(samples) if self._team.is_leader else _read_outlines(received)

    def deliver(self, samples: Sequence[Sample], wanted: Sequence[AbstractSet[int]]) -> list[Sample]:
        """`samples` with their arrays where this rank trains on them; `wanted` are their ids by data-parallel rank."""
        if self._team.size == 1:
            return list(samples)

        def part_of(data_rank: int) -> bytes:
            return _arrays(samples[i] for i in sorted(wanted[data_rank]))

        received = self._team.deliver(part_of)
        if self._team.is_leader:
            return list(samples)
        whole = list(samples)
        for sample_id, arrays in _read_arrays(received):
            whole[sample_id] = _filled(samples[sample_id], arrays)
        return whole

    def whole(self, samples: Sequence[Sample], num_data_ranks: int) -> list[Sample]:
        """Everything to every rank."""
        outlines = self.outline(samples)
        return self.deliver(outlines, [set(range(len(outlines)))] * num_data_ranks)


def trained_on(plan: PackPlan) -> list[set[int]]:
    """Ids of the samples of each data-parallel rank, over all minibatches and epochs."""
    ids: list[set[int]] = [set() for _ in plan.assignment[0]]
    for minibatch in plan.assignment:
        for own, micro_batches in zip(ids, minibatch, strict=True):
            own.update(sample for micro in micro_batches for sample in micro)
    return ids


def _outlines(samples: Sequence[Sample]) -> bytes:
    header = {
        "scalars": [[_plain(getattr(sample, name)) for name in _SCALARS] for sample in samples],
        "lengths": [len(sample.token_ids) for sample in samples],
        "has_components": [sample.components is not None for sample in samples],
    }
    masks = [sample.loss_mask for sample in samples]
    bits = np.packbits(np.concatenate(masks) if masks else np.zeros(0, dtype=bool))
    return _to_bytes(header, [bits, *(s.components for s in samples if s.components is not None)])


def _read_outlines(data: bytes) -> list[Sample]:
    header, (bits, *arrays) = _from_bytes(data)
    lengths = header["lengths"]
    mask = np.unpackbits(bits, count=sum(lengths)).astype(bool)
    bounds = np.cumsum([0, *lengths]).tolist()
    components = iter(arrays)
    samples = []
    for scalars, length, start, has in zip(
        header["scalars"], lengths, bounds[:-1], header["has_components"], strict=True
    ):
        samples.append(
            Sample(
                **dict(zip(_SCALARS, scalars, strict=True)),
                token_ids=_nothing(length, np.int32),
                loss_mask=mask[start : start + length],
                rollout_logprobs=_nothing(length, np.float32),
                advantages=_nothing(length, np.float32),
                components=next(components) if has else None,
            )
        )
    return samples


def _nothing(length: int, dtype: Any) -> np.ndarray:
    """An array that has its length and takes no memory."""
    return np.broadcast_to(np.zeros((), dtype=dtype), (length,))


def _arrays(samples: Iterable[Sample]) -> bytes:
    names, arrays = [], []
    for sample in samples:
        own = {
            "token_ids": sample.token_ids,
            "rollout_logprobs": sample.rollout_logprobs,
            "advantages": sample.advantages,
        }
        if sample.routed_experts is not None:
            own["routed_experts"] = _narrow(sample.routed_experts.open())
        if sample.has_route is not None:
            own["has_route"] = sample.has_route
        if sample.support is not None:
            own |= {"support_ids": sample.support.ids, "support_offsets": sample.support.offsets}
        if sample.top_logprobs is not None:
            own |= {"top_ids": sample.top_logprobs.ids, "top_logprobs": sample.top_logprobs.logprobs}
        names.append([sample.sample_id, list(own)])
        arrays += own.values()
    return _to_bytes({"samples": names}, arrays)


def _read_arrays(data: bytes) -> list[tuple[int, dict[str, np.ndarray]]]:
    header, arrays = _from_bytes(data)
    rest = iter(arrays)
    return [(sample_id, {name: next(rest) for name in names}) for sample_id, names in header["samples"]]


def _filled(outline: Sample, arrays: dict[str, np.ndarray]) -> Sample:
    routes = arrays.get("routed_experts")
    support, top = None, None
    if "support_ids" in arrays:
        support = Support(arrays["support_ids"], arrays["support_offsets"])
    if "top_ids" in arrays:
        top = TopLogprobs(arrays["top_ids"], arrays["top_logprobs"])
    return replace(
        outline,
        token_ids=arrays["token_ids"],
        rollout_logprobs=arrays["rollout_logprobs"],
        advantages=arrays["advantages"],
        routed_experts=None if routes is None else LocalArray(routes),
        has_route=arrays.get("has_route"),
        support=support,
        top_logprobs=top,
    )


def _narrow(routes: np.ndarray) -> np.ndarray:
    """One byte per expert, or two where there are more than 256."""
    if routes.dtype in (np.uint8, np.int16):
        return routes
    return routes.astype(np.uint8 if routes.max(initial=0) < _MAX_UINT8_EXPERTS else np.int16)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _to_bytes(header: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Length of a JSON text, the text, then every array's bytes."""
    described = [[array.dtype.name, list(array.shape)] for array in arrays]
    text = json.dumps({**header, "arrays": described}).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(array).data for array in arrays)])


def _from_bytes(data: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Inverse of `_to_bytes`; the arrays can be written to."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    arrays = []
    for name, shape in header["arrays"]:
        if name not in _DTYPES:
            raise DataError(f"another rank sent an array of {name!r}; allowed: {', '.join(sorted(_DTYPES))}")
        count = math.prod(shape)
        array = np.frombuffer(data, dtype=name, count=count, offset=start).reshape(shape)
        arrays.append(array.copy())
        start += array.nbytes
    if start != len(data):
        raise DataError(f"another rank sent {len(data)} bytes of samples where its list has {start}")
    return header, arrays
