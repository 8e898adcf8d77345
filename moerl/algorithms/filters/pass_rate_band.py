"""Sample prompts that are neither too hard nor too easy (Goldilocks), by their last visit."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.algorithms.checks import check_range
from moerl.algorithms.pass_rate import PassRate
from moerl.algorithms.registries import filters


@dataclass(frozen=True)
class PassRateBandConfig:
    """The band, and how long an estimate holds."""

    low: float = 0.2
    high: float = 0.8
    every_steps: int = 500
    """A prompt outside the band is sampled again when its last visit is so many steps ago."""

    def __post_init__(self) -> None:
        check_range("filter.low", self.low, 0.0, 1.0)
        check_range("filter.high", self.high, self.low, 1.0)
        check_range("filter.every_steps", self.every_steps, 1)


@filters.register("pass_rate_band", PassRateBandConfig, acts_on="prompt")
def pass_rate_band(rate: PassRate, step: int, cfg: PassRateBandConfig) -> bool:
    """Inside the band at the last visit, or due for another estimate."""
    if rate.recent is None or step - rate.step >= cfg.every_steps:
        return True
    return cfg.low <= rate.recent <= cfg.high
