"""Retire prompts that the policy has learned (ScaleRL, arXiv 2510.13786)."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.algorithms.checks import check_above, check_range
from moerl.algorithms.pass_rate import PassRate
from moerl.algorithms.registries import filters


@dataclass(frozen=True)
class NoPositiveResamplingConfig:
    """When a prompt is learned."""

    threshold: float = 0.9
    """Pass rate over all its answers so far."""

    def __post_init__(self) -> None:
        check_above("filter.threshold", self.threshold, 0.0)
        check_range("filter.threshold", self.threshold, 0.0, 1.0)


@filters.register("no_positive_resampling", NoPositiveResamplingConfig, acts_on="prompt")
def no_positive_resampling(rate: PassRate, step: int, cfg: NoPositiveResamplingConfig) -> bool:
    """Below the threshold, or never sampled."""
    return rate.overall is None or rate.overall < cfg.threshold
