"""GAE, its adaptive lambda, and the value loss: numbers worked out by hand, and the recursion as the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moerl.algorithms.values import ValueCredit, adaptive_lambda, gae, on_last_token, value_loss

VALUES = torch.tensor([0.2, 0.4, 0.5, 0.3], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
EVERY = torch.ones(4, dtype=torch.bool)
ONE = torch.zeros(4, dtype=torch.int64)


def close(found: Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=2e-6)


def test_gae_of_one_answer():
    close(gae(REWARDS, VALUES, EVERY, ONE, lam=0.95), [0.714662, 0.541750, 0.465000, 0.700000])
    close(gae(REWARDS, VALUES, EVERY, ONE, lam=1.0) + VALUES, [1.0, 1.0, 1.0, 1.0])
    close(gae(REWARDS, VALUES, EVERY, ONE, lam=0.0), [0.2, 0.1, -0.2, 0.7])


def test_gae_skips_tokens_that_are_not_the_policys():
    mask = torch.tensor([True, False, True, True])
    close(gae(REWARDS, VALUES, mask, ONE, lam=0.95), [0.741750, 0.0, 0.465000, 0.700000])


def test_gae_reads_nothing_outside_the_mask():
    mask = torch.tensor([True, False, True, True])
    broken = torch.where(mask, VALUES, math.nan)
    torch.testing.assert_close(
        gae(torch.where(mask, REWARDS, math.inf), broken, mask, ONE, lam=0.95),
        gae(REWARDS, VALUES, mask, ONE, lam=0.95),
        rtol=0,
        atol=0,
    )


def test_gae_of_no_live_token():
    close(gae(REWARDS, VALUES, ~EVERY, ONE, lam=0.95), [0.0] * 4)


def test_value_loss():
    new = torch.tensor([0.7, 0.1, 0.5, 0.35], dtype=torch.float64, requires_grad=True)
    loss, is_clipped = value_loss(new, VALUES, torch.ones(4, dtype=torch.float64), clip=0.2)
    close(loss.detach(), [0.180000, 0.405000, 0.125000, 0.211250])
    assert float(loss.detach().mean()) == pytest.approx(0.230312, abs=1e-6)
    assert is_clipped.tolist() == [True, False, False, False]
    loss.sum().backward()
    assert new.grad is not None
    close(new.grad, [0.0, 0.1 - 1, 0.5 - 1, 0.35 - 1])
    unclipped, none = value_loss(new, VALUES, torch.ones(4, dtype=torch.float64), clip=None)
    close(unclipped.detach(), [0.045, 0.405, 0.125, 0.21125])
    assert not none.any()


def test_adaptive_lambda():
    lengths = [10, 20, 40, 100, 1000]
    seq_ids = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    lam = adaptive_lambda(torch.ones_like(seq_ids, dtype=torch.bool), seq_ids, 5, alpha=0.05)
    firsts = [sum(lengths[:i]) for i in range(5)]
    close(lam[firsts], [0.0, 0.0, 0.5, 0.8, 0.98])


def test_the_reward_is_paid_at_the_last_live_token():
    mask = torch.tensor([False, True, True, False, True, False, False])
    seq_ids = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    rewards = torch.tensor([2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 5.0])
    assert on_last_token(rewards, mask, seq_ids).tolist() == [0.0, 0.0, 2.0, 0.0, 3.0, 0.0, 0.0]


def test_no_token_of_a_long_answer_but_the_last_is_paid():
    seq_ids, rewards = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.arange(1.0, 8.0)
    assert on_last_token(rewards, torch.ones(7, dtype=torch.bool), seq_ids).tolist() == [0, 0, 0, 4, 0, 0, 7]


def test_policy_and_critic_have_their_own_lambda():
    """VAPO: advantages at the adaptive lambda (0 for so short an answer), targets at 1."""
    credit = ValueCredit(gamma=1.0, gae_lambda=0.95, gae_alpha=0.05, critic_lambda=1.0)
    advantages, returns = credit(REWARDS, VALUES, EVERY, ONE, 1)
    close(advantages, [0.2, 0.1, -0.2, 0.7])
    close(returns, [1.0, 1.0, 1.0, 1.0])
    shared = ValueCredit(gamma=1.0, gae_lambda=0.95, gae_alpha=None, critic_lambda=None)
    advantages, returns = shared(REWARDS, VALUES, EVERY, ONE, 1)
    close(returns - VALUES, advantages.tolist())


def looped(rewards: list[float], values: list[float], mask: list[bool], owner: list[int], lam: float, gamma: float):
    """The recursion as it is written, from the last token to the first."""
    result = [0.0] * len(rewards)
    next_value = next_advantage = 0.0
    previous = None
    for j in reversed(range(len(rewards))):
        if owner[j] != previous:
            next_value = next_advantage = 0.0
            previous = owner[j]
        if not mask[j]:
            continue
        delta = rewards[j] + gamma * next_value - values[j]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[j]
        result[j] = next_advantage
    return result


@settings(max_examples=60)
@given(
    data=st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans(), st.booleans()), min_size=1, max_size=40),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    gamma=st.sampled_from([0.9, 1.0]),
)
def test_gae_is_the_recursion(data, lam, gamma):
    rewards, values, mask, starts = (list(column) for column in zip(*data, strict=True))
    owner = [sum(starts[1 : j + 1]) for j in range(len(starts))]
    found = gae(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(mask),
        torch.tensor(owner),
        lam=lam,
        gamma=gamma,
    )
    wanted = torch.tensor(looped(rewards, values, mask, owner, lam, gamma), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_is_inside_the_clip_is_never_counted_as_clipped_by_rounding():
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(20_000, generator=generator), torch.randn(20_000, generator=generator)
    values = old + 0.19 * (2 * torch.rand(20_000, generator=generator) - 1)
    losses, is_clipped = value_loss(values, old, returns, clip=0.2)
    assert not is_clipped.any()
    assert torch.equal(losses, 0.5 * (values - returns).square())
