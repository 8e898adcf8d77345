"""Generalised advantage estimation and the value loss of a critic (PPO arXiv 1707.06347, GAE arXiv 1506.02438, VAPO
arXiv 2504.05118). Functions of packed [t] tensors; index j of a value speaks of the state before token j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.segments import masked_seq_sum
from moerl.config.schema import AdvantageSection, CriticSection


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, seq_ids: Tensor, *, lam: Tensor | float, gamma: float = 1.0
) -> Tensor:
    """Advantages [t] float64, 0 outside `mask`: A_j = r_j + gamma V_k - V_j + gamma lam A_k, k the next live token.

    After a sequence's last live token value and advantage are 0; tokens outside the mask are skipped. Detached.

    Args:
        token_rewards: [t], read on live tokens.
        values: [t], read on live tokens.
        mask: [t] bool.
        seq_ids: [t] int64, non-decreasing.
        lam: one lambda, or one for each token [t] (the same over a sequence).
        gamma: discount per live token.
    """
    positions = mask.nonzero().squeeze(1)
    result = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    if not len(positions):
        return result
    reward, value = (x.detach()[positions].double() for x in (token_rewards, values))
    owner = seq_ids[positions]
    decay = gamma * torch.as_tensor(lam, dtype=torch.float64, device=mask.device).expand(mask.shape)[positions]
    follows = torch.zeros_like(reward)
    follows[:-1] = (owner[1:] == owner[:-1]).double()
    delta = reward + gamma * follows * value.roll(-1) - value
    result[positions] = _discounted_sum(delta, decay * follows)
    return result


def _discounted_sum(delta: Tensor, decay: Tensor) -> Tensor:
    """x_j = delta_j + decay_j x_{j+1}, by doubling: log2(m) vector steps, no loop over tokens.

    After step s, `delta` holds the sum over 2^s tokens and `decay` the product of their factors.
    """
    step = 1
    while step < len(delta) and bool(decay.any()):
        later, factor = torch.zeros_like(delta), torch.zeros_like(decay)
        later[:-step], factor[:-step] = delta[step:], decay[step:]
        delta, decay = delta + decay * later, decay * factor
        step *= 2
    return delta


def adaptive_lambda(mask: Tensor, seq_ids: Tensor, num_seqs: int, *, alpha: float) -> Tensor:
    """[t] float64: 1 - 1 / (alpha n) of each token's sequence of n live tokens, within [0, 1] (VAPO)."""
    lengths = masked_seq_sum(mask.double(), mask, seq_ids, num_seqs)
    return (1 - 1 / (alpha * lengths.clamp(min=1.0))).clamp(0.0, 1.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 max((V - ret)^2, (clip(V, V_old - c, V_old + c) - ret)^2) [t] with gradient to `values`; and where the
    clipped branch, which has no gradient, was the larger [t] bool. Without `clip` the plain half square.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(values, dtype=torch.bool)
    held = torch.clamp(values, old_values - clip, old_values + clip)  # inside the bounds it is `values` to the last bit
    clipped = (held - returns).square()
    is_clipped = clipped > plain
    return 0.5 * torch.where(is_clipped, clipped, plain), is_clipped.detach()


def on_last_token(rewards: Tensor, mask: Tensor, seq_ids: Tensor) -> Tensor:
    """`rewards` [t] on the last live token of each sequence, 0 elsewhere: where an answer's reward is paid."""
    positions = mask.nonzero().squeeze(1)
    is_last = torch.ones_like(positions, dtype=torch.bool)
    is_last[:-1] = seq_ids[positions][1:] != seq_ids[positions][:-1]
    result = torch.zeros_like(rewards)
    result[positions[is_last]] = rewards[positions[is_last]]
    return result


@dataclass(frozen=True)
class ValueCredit:
    """Advantages for the policy and targets for the critic, each with its own lambda."""

    gamma: float
    gae_lambda: float
    gae_alpha: float | None
    critic_lambda: float | None

    @classmethod
    def of(cls, advantage: AdvantageSection, critic: CriticSection) -> ValueCredit:
        """As configured."""
        return cls(advantage.gamma, advantage.gae_lambda, advantage.gae_alpha, critic.gae_lambda)

    def __call__(
        self, token_rewards: Tensor, old_values: Tensor, mask: Tensor, seq_ids: Tensor, num_seqs: int
    ) -> tuple[Tensor, Tensor]:
        """(advantages, returns) [t] float64 each, 0 outside `mask`."""
        lam: Tensor | float = self.gae_lambda
        if self.gae_alpha is not None:
            lam = adaptive_lambda(mask, seq_ids, num_seqs, alpha=self.gae_alpha)
        advantages = gae(token_rewards, old_values, mask, seq_ids, lam=lam, gamma=self.gamma)
        targets = advantages
        if self.critic_lambda is not None:
            targets = gae(token_rewards, old_values, mask, seq_ids, lam=self.critic_lambda, gamma=self.gamma)
        return advantages, torch.where(mask, targets + old_values.double(), 0.0)
