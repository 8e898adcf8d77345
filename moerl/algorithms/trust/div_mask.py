"""DPPO's divergence mask (arXiv 2602.04879): drop tokens too far from the rollout policy that move further."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moerl.algorithms.checks import check_above, check_choice, check_range
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.types import LossInputs, TokenLoss


@dataclass(frozen=True)
class DivMaskConfig:
    """Which divergence of the sampled token's Bernoulli, and how much of it."""

    kind: str = "binary_tv"
    """`binary_tv` (delta 0.15 in the paper) or `binary_kl` (0.05)."""
    delta: float = 0.15
    cap: float = 10.0
    """Ceiling of the importance weight."""
    one_sided: bool = True
    """False also blocks moves back toward the rollout policy (a survey's form)."""

    def __post_init__(self) -> None:
        check_choice("trust.kind", self.kind, ("binary_tv", "binary_kl"))
        check_range("trust.delta", self.delta, 0.0)
        check_above("trust.cap", self.cap, 1.0)


def binary_divergence(kind: str, logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Divergence [t] between the Bernoullis "this token or another" of the rollout policy and of the current one."""
    p, b = logprobs.exp(), rollout_logprobs.exp()
    if kind == "binary_tv":
        return (p - b).abs()
    rest_p, rest_b = (1 - p).clamp(min=1e-8), (1 - b).clamp(min=1e-8)
    return b * (rollout_logprobs - logprobs) + rest_b * (rest_b / rest_p).log()


@trust_regions.register("div_mask", DivMaskConfig, form="score", needs=("rollout_logprobs",))
def div_mask(log_ratio: Tensor, x: LossInputs, cfg: DivMaskConfig) -> TokenLoss:
    """-sg[M min(ratio, cap)] A lp."""
    logprobs = x.logprobs.detach()
    far = binary_divergence(cfg.kind, logprobs, x.rollout_logprobs) > cfg.delta
    moved = logprobs - x.rollout_logprobs
    high, low = far & (x.advantages > 0), far & (x.advantages < 0)
    if cfg.one_sided:
        high, low = high & (moved > 0), low & (moved < 0)
    weight = log_ratio.detach().exp().clamp(max=cfg.cap) * ~(high | low)
    return TokenLoss(-weight * x.advantages * x.logprobs, {"pg/clip_high": high, "pg/clip_low": low})
