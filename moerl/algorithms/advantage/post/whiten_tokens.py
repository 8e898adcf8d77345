"""Mean 0 and std 1 over all live tokens of the step (PPO, REINFORCE++ arXiv 2501.03262); after the score pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_above, check_choice
from moerl.algorithms.registries import advantage_posts


@dataclass(frozen=True)
class WhitenTokensConfig:
    """How the standard deviation is taken."""

    ddof: int = 0
    eps: float = 1e-8
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        check_choice("post.ddof", str(self.ddof), ("0", "1"))
        check_above("post.eps", self.eps, 0.0)


@advantage_posts.register("whiten_tokens", WhitenTokensConfig, acts_on="tokens")
def whiten_tokens(advantages: Tensor, cfg: WhitenTokensConfig) -> Tensor:
    """(A - mean) / (std + eps) of the live tokens [m]; the same for every order of them. Equal ones give 0."""
    if not len(advantages):
        return advantages
    centred = advantages - advantages.mean()
    std = (centred.square().sum() / max(len(advantages) - cfg.ddof, 1)).sqrt()
    return centred / (std + cfg.eps)
