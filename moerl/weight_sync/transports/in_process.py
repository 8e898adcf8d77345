"""For engines in the trainer's own process: hand over a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moerl.protocols import RolloutEngine
from moerl.types import WeightBucket
from moerl.weight_sync.transport import transports


@dataclass(frozen=True)
class InProcessConfig:
    """No arguments."""


@transports.register("in_process", InProcessConfig)
class InProcess:
    """Calls each engine; every engine gets its own copy, since the optimizer goes on in the trainer's memory."""

    def __init__(self, config: InProcessConfig) -> None:
        """`config` has no fields."""

    async def send(self, bucket: WeightBucket, engines: Sequence[RolloutEngine]) -> None:
        """One engine after the other: they share the processor anyway, and one copy at a time bounds the memory."""
        for engine in engines:
            copied = [(name, tensor.detach().clone()) for name, tensor in bucket.tensors]
            await engine.update_weights(replace(bucket, tensors=copied))

    def close(self) -> None:
        """Nothing is held."""
