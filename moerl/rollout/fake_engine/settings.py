"""How a fake server is made: its shape, its speed, and how long its answers are."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from moerl.errors import ConfigError

_LENGTHS = re.compile(r"(fixed|uniform|lognormal):([\d.,]+)")


@dataclass(frozen=True)
class FakeEngineConfig:
    """Of one fake server."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    admin_key: str = ""
    """Control endpoints ask for it; empty: they are open, as SGLang's are."""
    vocab_size: int = 320
    num_layers: int = 3
    dense_layers: int = 0
    """So many of the first layers have no router; their slots stay 0."""
    num_experts: int = 8
    experts_per_token: int = 2
    returns_routes: bool = True
    """As `--enable-return-routed-experts`; without it nothing is returned, and no error."""
    memory_saver: bool = False
    """As `--enable-memory-saver`; without it memory is released in name alone."""
    context_length: int = 1 << 20
    eos_token_id: int = 1
    data_size: int = 1
    tensor_size: int = 1
    weight_version: str = "default"
    """Label at the start, and after a restart."""
    max_running_requests: int = 256
    """More wait in the queue."""
    lengths: str = "fixed:1000000000"
    """Tokens of prompt and answer together at which the end token comes: `fixed:N`, `uniform:A,B` or
    `lognormal:MEDIAN,SIGMA`, drawn by the request's key (`model.py`): a resumed answer ends where it would have."""
    token_seconds: float = 0.0
    prefill_token_seconds: float = 0.0
    update_seconds: float = 0.0
    """Of one weight bucket, or one load from disk."""
    health_seconds: float = 0.0
    """A real server takes 1 s or more."""
    is_constant: bool = False
    """Every label is the same model, as of a policy that does not move."""
    seed: int = 0
    """Another seed is another model."""

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.num_layers, self.num_experts, self.experts_per_token, self.data_size)
        if min(*sizes, self.tensor_size, self.max_running_requests, self.context_length) < 1:
            raise ConfigError("a fake engine's sizes must be 1 or more")
        if self.experts_per_token > self.num_experts or not 0 <= self.dense_layers <= self.num_layers:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} must be at most num_experts={self.num_experts}, and "
                f"dense_layers={self.dense_layers} between 0 and num_layers={self.num_layers}"
            )
        if not 0 <= self.eos_token_id < self.vocab_size or self.vocab_size < 3:
            raise ConfigError(
                f"eos_token_id={self.eos_token_id} must be below vocab_size={self.vocab_size}, which is at least 3"
            )
        if min(self.token_seconds, self.prefill_token_seconds, self.update_seconds, self.health_seconds) < 0:
            raise ConfigError("a fake engine's times must be 0 or more")
        self.length(0.5)

    def length(self, quantile: float) -> int:
        """Tokens of the text at `quantile` in 0..1 of the distribution.

        Raises:
            ConfigError: `lengths` is none of the known forms.
        """
        found = _LENGTHS.fullmatch(self.lengths)
        numbers = [float(text) for text in found[2].split(",")] if found else []
        if not found or len(numbers) != (1 if found[1] == "fixed" else 2) or numbers[0] < 1:
            raise ConfigError(
                f"lengths is {self.lengths!r}, but must be fixed:N, uniform:A,B or lognormal:MEDIAN,SIGMA"
            )
        if found[1] == "fixed":
            return int(numbers[0])
        if found[1] == "uniform":
            return int(numbers[0] + quantile * (numbers[1] - numbers[0]))
        return max(1, int(numbers[0] * math.exp(numbers[1] * _normal_quantile(quantile))))


def _normal_quantile(quantile: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(min(max(quantile, 1e-9), 1 - 1e-9))
