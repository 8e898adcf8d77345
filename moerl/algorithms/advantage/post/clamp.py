"""Bound the size of advantages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_above
from moerl.algorithms.registries import advantage_posts


@dataclass(frozen=True)
class ClampConfig:
    """The bound."""

    limit: float = 5.0

    def __post_init__(self) -> None:
        check_above("post.limit", self.limit, 0.0)


@advantage_posts.register("clamp", ClampConfig)
def clamp(advantages: Tensor, scored: Tensor, cfg: ClampConfig) -> Tensor:
    """Within plus and minus the limit."""
    return advantages.clamp(-cfg.limit, cfg.limit)
