"""The weight transport protocol and its registry: a transport is one class in `transports/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from moerl.protocols import RolloutEngine
from moerl.registry import Registry
from moerl.types import WeightBucket


class WeightTransport(Protocol):
    """Brings buckets to engines; it knows neither who trains nor what an engine does with them."""

    async def send(self, bucket: WeightBucket, engines: Sequence[RolloutEngine]) -> None:
        """Give `bucket` to every engine, bit for bit, and return once all have taken it.

        The trainer may change its tensors as soon as this returns, so an engine gets memory of its own.

        Raises:
            MoerlError or OSError: an engine refused or was lost.
        """
        ...

    def close(self) -> None:
        """Release what the transport holds."""
        ...


transports: Registry[Callable[[Any], WeightTransport]] = Registry("weight transport", "moerl.weight_sync.transports")
"""Classes whose constructor takes their config object."""
