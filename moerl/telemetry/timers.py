"""Where the time of a step goes: seconds by phase and tokens per second, as metrics under `perf/`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from moerl.metrics import Max, Mean, Metrics


@dataclass
class _Rate:
    tokens: int = 0
    phases: set[str] = field(default_factory=set)


class Timers:
    """Stop-watches by phase: `with timers("rollout"): ...`; entered again, a phase adds up. Wall time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds from any origin."""
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._rates: dict[str, _Rate] = {}
        self._since = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the block, also where it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    def count_tokens(self, name: str, tokens: int, *, phases: Sequence[str]) -> None:
        """Report `perf/<name>_tokens_per_second`: tokens counted under `name`, by the seconds of `phases`."""
        rate = self._rates.setdefault(name, _Rate())
        rate.tokens += tokens
        rate.phases.update(phases)

    def collect(self) -> Metrics:
        """What was measured since the last `collect`; resets.

        `perf/<phase>_seconds`, `perf/<name>_tokens_per_second`, and `perf/step_seconds` for the whole time between.
        Seconds merge as the slowest rank's; rates as tokens by seconds. A rate whose phases took no time has no value.
        """
        now = self._clock()
        metrics: Metrics = {f"perf/{phase}_seconds": Max(seconds) for phase, seconds in self._seconds.items()}
        metrics["perf/step_seconds"] = Max(now - self._since)
        for name, rate in self._rates.items():
            seconds = sum(self._seconds.get(phase, 0.0) for phase in rate.phases)
            metrics[f"perf/{name}_tokens_per_second"] = Mean(float(rate.tokens) if seconds else 0.0, seconds)
        self._seconds, self._rates, self._since = {}, {}, now
        return metrics
