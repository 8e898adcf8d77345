"""The weight transport protocol and its registry: a transport is one class in `transports/`.

Some engines live in this process; a transport gives them tensors. Others speak to servers in other processes through a
`sender` of their own, which the same file registers beside its transport:

    @transports.register("disk", DiskConfig, sender=DiskSender)
    class Disk(HandOver): ...

`build.py` makes the sender, `DiskSender(config, place)` with a `moerl.weight_sync.servers.SenderPlace`, and gives it to
engines that inject `sender`; the transport then only hands them the buckets.
"""

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


class HandOver:
    """For engines with a sender: each gets the trainer's own tensors, and is done with them when its call returns."""

    def __init__(self, config: object) -> None:
        """`config` is the sender's business."""

    async def send(self, bucket: WeightBucket, engines: Sequence[RolloutEngine]) -> None:
        """One engine after the other; each has all its servers at work."""
        for engine in engines:
            await engine.update_weights(bucket)

    def close(self) -> None:
        """Nothing is held."""


transports: Registry[Callable[[Any], WeightTransport]] = Registry("weight transport", "moerl.weight_sync.transports")
"""Classes whose constructor takes their config object."""
