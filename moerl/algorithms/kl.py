"""Estimators of KL(policy || reference) per token, and which of them have which gradient.

In expectation over the policy's own samples: k1 has no gradient, k2 has that of the reverse KL, k3 has that of the
forward KL (biased for the reverse one); with `importance` all are unbiased in value and gradient (arXiv 2510.01555,
2512.02556).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.ratio import clamp_log_ratio


def kl_estimate(estimator: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 = D, k2 = D^2 / 2, k3 = exp(-D) - 1 + D with D = logprobs - ref_logprobs clamped to [-20, 20]; [t]."""
    d = clamp_log_ratio(logprobs - ref_logprobs)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"KL estimator {estimator!r}; choose k1, k2 or k3")


def straight_through_kl(estimator: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Value of `estimator`, gradient of k2; [t]."""
    k2 = kl_estimate("k2", logprobs, ref_logprobs)
    return k2 - k2.detach() + kl_estimate(estimator, logprobs, ref_logprobs).detach()


def importance_kl(estimator: str, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """`estimator` times the token ratio to the old policy, gradient through both factors; [t]."""
    ratio = clamp_log_ratio(logprobs - old_logprobs).exp()
    return ratio * kl_estimate(estimator, logprobs, ref_logprobs)
