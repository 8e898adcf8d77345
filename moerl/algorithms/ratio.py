"""Importance-ratio levels: token log-ratios to the log-ratio that the trust region sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.prefixes import min_before, prefix_sum
from moerl.algorithms.segments import answers_at_once, masked_seq_mean, masked_seq_sum
from moerl.algorithms.types import LossInputs

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus and minus this before exp; beyond it the gradient is 0."""


@dataclass(frozen=True)
class RatioLevel:
    """One level."""

    log_ratio: Callable[[Tensor, LossInputs], Tensor]
    """(token log-ratios [t], inputs) -> unclamped log-ratio [t]."""
    constant_advantage: bool = False
    """The advantage must be the same on all tokens of a sequence."""
    is_mean: bool | None = None
    """For levels with one ratio a sequence: its log is the mean (True) or the sum (False) over the tokens."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp before exp: the value is that of the limit, the gradient beyond it is 0."""
    if answers_at_once(log_ratio) and log_ratio.numel():
        low, high = log_ratio.detach().aminmax()
        if low >= -LOG_RATIO_LIMIT and high <= LOG_RATIO_LIMIT:  # not so for NaN
            return log_ratio
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _no_ratio(token_log_ratio: Tensor, x: LossInputs) -> Tensor:
    return torch.zeros_like(token_log_ratio)


def _token(token_log_ratio: Tensor, x: LossInputs) -> Tensor:
    return token_log_ratio


def _seq_geo(token_log_ratio: Tensor, x: LossInputs) -> Tensor:
    return masked_seq_mean(token_log_ratio, x.mask, x.seq_ids, x.num_seqs)


def _seq_geo_token(token_log_ratio: Tensor, x: LossInputs) -> Tensor:
    """Value of the sequence, gradient of the token (GSPO-token, arXiv 2507.18071)."""
    return _seq_geo(token_log_ratio.detach(), x) + (x.logprobs - x.logprobs.detach())


def _prefix_prod(token_log_ratio: Tensor, x: LossInputs) -> Tensor:
    """Value of the product up to the token, gradient of the token (CTPO, arXiv 2605.07331, and its authors' code)."""
    return prefix_sum(token_log_ratio, x.mask, x.seq_ids, x.num_seqs) + (x.logprobs - x.logprobs.detach())


def _prefix_min(token_log_ratio: Tensor, x: LossInputs) -> Tensor:
    """The token's ratio times the smallest one before it (MinPRO, arXiv 2601.22718), which is detached."""
    return token_log_ratio + min_before(token_log_ratio, x.mask, x.seq_ids, x.num_seqs)


def _seq_prod(token_log_ratio: Tensor, x: LossInputs) -> Tensor:
    return masked_seq_sum(token_log_ratio, x.mask, x.seq_ids, x.num_seqs)


LEVELS = {
    "none": RatioLevel(_no_ratio),
    "token": RatioLevel(_token),
    "seq_geo": RatioLevel(_seq_geo, constant_advantage=True, is_mean=True),
    "seq_geo_token": RatioLevel(_seq_geo_token),
    "seq_prod": RatioLevel(_seq_prod, constant_advantage=True, is_mean=False),
    "prefix_prod": RatioLevel(_prefix_prod),
    "prefix_min": RatioLevel(_prefix_min),
    # The trust region `log_clip` clips each token first and takes the mean itself (GMPO).
    "geo_clip": RatioLevel(_token, constant_advantage=True),
}
