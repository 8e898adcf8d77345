"""Where the time of a step goes: seconds by phase and tokens per second, as metrics under `perf/`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from moerl.metrics import Max, Mean, Metrics


@dataclass
class _Rate:
    tokens: float = 0
    seconds: float = 0.0
    """Beside those of the phases."""
    phases: set[str] = field(default_factory=set)


class Timers:
    """Stop-watches by phase: `with timers("rollout"): ...`; entered again, a phase adds up. Wall time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        num_devices: int = 1,
        peak_flops: float | None = None,
    ) -> None:
        """`clock` gives seconds from any origin; `peak_flops` is what one device could do a second, where known."""
        self._clock = clock
        self._num_devices = num_devices
        self._peak_flops = peak_flops
        self._flops = _Rate()
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

    def count_tokens(self, name: str, tokens: int, *, phases: Sequence[str], seconds: float | None = None) -> None:
        """Report `perf/<name>_tokens_per_second`: tokens counted under `name`, by the seconds of `phases`.

        `seconds`, where they are known otherwise, stand in for those of the phases.
        """
        rate = self._rates.setdefault(name, _Rate())
        rate.tokens += tokens
        if seconds is not None:
            rate.seconds += seconds
            return
        rate.phases.update(phases)

    def count_flops(self, flops: float, *, phases: Sequence[str]) -> None:
        """Report `perf/tflops`: operations of all devices together, by the seconds of `phases` and by the device."""
        self._flops.tokens += flops
        self._flops.phases.update(phases)

    def collect(self) -> Metrics:
        """What was measured since the last `collect`; resets.

        `perf/<phase>_seconds`, `perf/<name>_tokens_per_second`, and `perf/step_seconds` for the whole time between;
        `perf/tflops` of a device where operations were counted, and `perf/mfu`, its share of the peak, where that is
        known.
        Seconds merge as the slowest rank's; rates as tokens by seconds. A rate whose phases took no time has no value.
        """
        now = self._clock()
        metrics: Metrics = {f"perf/{phase}_seconds": Max(seconds) for phase, seconds in self._seconds.items()}
        metrics["perf/step_seconds"] = Max(now - self._since)
        for name, rate in self._rates.items():
            seconds = rate.seconds + sum(self._seconds.get(phase, 0.0) for phase in rate.phases)
            metrics[f"perf/{name}_tokens_per_second"] = Mean(float(rate.tokens) if seconds else 0.0, seconds)
        seconds = sum(self._seconds.get(phase, 0.0) for phase in self._flops.phases)
        if seconds:
            done = self._flops.tokens / self._num_devices
            metrics["perf/tflops"] = Mean(done / 1e12, seconds)
            if self._peak_flops:
                metrics["perf/mfu"] = Mean(done / self._peak_flops, seconds)
        self._seconds, self._rates, self._flops, self._since = {}, {}, _Rate(), now
        return metrics
