"""Nothing more."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.registries import advantage_posts


@dataclass(frozen=True)
class NoPostConfig:
    """No arguments."""


@advantage_posts.register("none", NoPostConfig)
def no_post(advantages: Tensor, scored: Tensor, cfg: NoPostConfig) -> Tensor:
    """The same."""
    return advantages
