"""DPPO's divergence mask (arXiv 2602.04879): drop tokens too far from the rollout policy that move further."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.checks import check_above, check_choice, check_range
from moerl.algorithms.registries import trust_regions
from moerl.algorithms.segments import masked_seq_rank
from moerl.algorithms.types import LossInputs, TokenLoss

KINDS = ("binary_tv", "binary_kl", "topk_tv", "topk_kl", "sampled_kl")
FLOOR = 1e-8
"""Smallest probability of what was not sampled, or lies outside the top k."""


@dataclass(frozen=True)
class DivMaskConfig:
    """Which divergence from the rollout policy, and how much of it."""

    kind: str = "binary_tv"
    """`binary_tv` (delta 0.15 in the paper), `binary_kl` (0.05): of the Bernoulli "this token or another"; `topk_tv`,
    `topk_kl`: over the rollout's likeliest tokens, the sampled one and the rest, which takes an engine that returns
    them; `sampled_kl`: p log(p / b) of the sampled token (a survey's form)."""
    delta: float = 0.15
    cap: float = 10.0
    """Ceiling of the importance weight."""
    one_sided: bool = True
    """False also blocks moves back toward the rollout policy (a survey's form)."""
    token_rank: int = 0
    """Above 0: only the so many tokens of largest divergence in each answer can be dropped (our reading of a survey's
    "top-k")."""

    def __post_init__(self) -> None:
        check_choice("trust.kind", self.kind, KINDS)
        check_range("trust.delta", self.delta, 0.0)
        check_above("trust.cap", self.cap, 1.0)
        check_range("trust.token_rank", self.token_rank, 0)


def binary_divergence(kind: str, logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Divergence [t] between the Bernoullis "this token or another" of the rollout policy and of the current one."""
    p, b = logprobs.exp(), rollout_logprobs.exp()
    if kind == "binary_tv":
        return (p - b).abs()
    rest_p, rest_b = (1 - p).clamp(min=FLOOR), (1 - b).clamp(min=FLOOR)
    return b * (rollout_logprobs - logprobs) + rest_b * (rest_b / rest_p).log()


def topk_divergence(kind: str, logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """[t, k + 1] logprobs of the two policies on the same tokens -> [t]; all other tokens are one more bucket.

    Columns that are -inf in both do not count.
    """
    p, b = logprobs.exp(), rollout_logprobs.exp()
    rest_p, rest_b = (1 - p.sum(-1)).clamp(min=FLOOR), (1 - b.sum(-1)).clamp(min=FLOOR)
    if kind == "topk_tv":
        return 0.5 * ((p - b).abs().sum(-1) + (rest_p - rest_b).abs())
    seen = rollout_logprobs.isfinite()
    gap = torch.where(seen, rollout_logprobs, 0) - torch.where(seen, logprobs.clamp(min=-1e4), 0)
    return (b * gap).sum(-1) + rest_b * (rest_b / rest_p).log()


def _divergence(x: LossInputs, cfg: DivMaskConfig) -> Tensor:
    logprobs = x.logprobs.detach()
    if cfg.kind.startswith("topk"):
        return topk_divergence(cfg.kind, x.topk_logprobs, x.rollout_topk)
    if cfg.kind == "sampled_kl":
        return logprobs.exp() * (logprobs - x.rollout_logprobs)
    return binary_divergence(cfg.kind, logprobs, x.rollout_logprobs)


def _needs(cfg: DivMaskConfig) -> tuple[str, ...]:
    return ("topk_logprobs", "rollout_topk") if cfg.kind.startswith("topk") else ()


@trust_regions.register("div_mask", DivMaskConfig, form="score", needs=("rollout_logprobs",), needs_of=_needs)
def div_mask(log_ratio: Tensor, x: LossInputs, cfg: DivMaskConfig) -> TokenLoss:
    """-sg[M min(ratio, cap)] A lp."""
    divergence = _divergence(x, cfg)
    far = divergence > cfg.delta
    if cfg.token_rank:
        far = far & (masked_seq_rank(divergence, x.mask, x.seq_ids) < cfg.token_rank)
    moved = x.logprobs.detach() - x.rollout_logprobs
    high, low = far & (x.advantages > 0), far & (x.advantages < 0)
    if cfg.one_sided:
        high, low = high & (moved > 0), low & (moved < 0)
    weight = log_ratio.detach().exp().clamp(max=cfg.cap) * ~(high | low)
    return TokenLoss(-weight * x.advantages * x.logprobs, {"pg/clip_high": high, "pg/clip_low": low})
