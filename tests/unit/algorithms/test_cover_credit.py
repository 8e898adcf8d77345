"""Returns to go, values as configured, coefficients that adapt, and what credit and expert load report."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moerl.algorithms.adaptive import Coefficients
from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.advantage.history import HISTORY, Pooled, PromptHistory
from moerl.algorithms.advantage.reward_table import RewardTable
from moerl.algorithms.load_metrics import LoadTracker, load_of_counts
from moerl.algorithms.returns import returns_to_go
from moerl.algorithms.types import CreditInputs
from moerl.algorithms.values import ValueCredit
from moerl.config.schema import AdvantageSection, CriticSection, EntropySection, KLSection
from moerl.errors import CheckpointError
from moerl.metrics import to_floats


def credit_inputs(rewards, groups=None, shaping=None, **state):
    rows = len(rewards)
    return CreditInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64).unsqueeze(1),
        reward_weights=torch.ones(1, dtype=torch.float64),
        group_ids=torch.tensor(groups or [0] * rows),
        lengths=torch.ones(rows, dtype=torch.int64),
        prompt_ids=tuple(f"p{group}" for group in groups or [0] * rows),
        shaping=torch.tensor(shaping or [0.0] * rows, dtype=torch.float64),
        state=state,
    )


def test_a_group_that_nobody_scored_is_not_one_without_spread():
    _, metrics = group_advantages(
        AdvantageSection(), credit_inputs([math.nan, math.nan, 1.0, 1.0, 0.5], [0, 0, 1, 1, 2])
    )
    seen = to_floats(metrics)
    assert seen["advantage/zero_variance_groups"] == 1
    assert seen["advantage/singleton_groups"] == 1
    assert seen["advantage/unscored"] == 2


def test_shaping_that_is_not_finite_leaves_the_row_unscored():
    advantages, metrics = group_advantages(
        AdvantageSection(scale="none"), credit_inputs([1.0, 0.0, 1.0], shaping=[0.0, 0.0, math.nan])
    )
    assert advantages.tolist() == [0.5, -0.5, 0.0]
    assert to_floats(metrics)["advantage/unscored"] == 1


def test_a_row_that_nobody_scored_makes_no_component_of_shaping():
    """With eps 0 a component without spread would be 0 / 0."""
    decoupled = {"name": "decoupled", "batch_norm": False}
    section = AdvantageSection(center="none", scale="batch_std_raw", eps=0.0, transform=decoupled)
    assert group_advantages(section, credit_inputs([1.0, 0.0, math.nan]))[0].tolist() == [2.0, 0.0, 0.0]


def test_leave_one_out_of_two_three_and_one():
    section = AdvantageSection(center="group_loo", scale="none")
    found, _ = group_advantages(section, credit_inputs([1.0, 0.0, 1.0, 0.0, 0.5, 2.0], [0, 0, 1, 1, 1, 2]))
    assert found.tolist() == pytest.approx([1.0, -1.0, 0.75, -0.75, 0.0, 0.0], abs=1e-12)


def test_statistics_of_one_scored_row():
    table = RewardTable.build(AdvantageSection(std_ddof=1), credit_inputs([math.nan, 0.75], [0, 1]))
    assert table.batch_mean(table.rewards) == 0.75
    assert table.batch_std(table.rewards) == 0
    assert Pooled(1, 1, 0.5, 0.0).std(1) == 0


def test_a_batch_of_equal_rewards_gives_exact_zeros():
    section = AdvantageSection(center="batch_mean", scale="batch_std_raw", eps=0.0)
    assert group_advantages(section, credit_inputs([0.1] * 3))[0].tolist() == [0.0] * 3
    spread = group_advantages(section, credit_inputs([0.1, 0.1, 0.4, 0.4], [0, 0, 1, 1]))[0]
    assert spread.abs().min() > 0.8  # a group without spread counts where center and scale are the batch's


def test_a_prompts_history_takes_a_single_answer_and_skips_what_nobody_scored():
    history = PromptHistory()
    section = AdvantageSection(center="history", transform={"name": "sas"})
    rewards, groups = [math.nan, 0.5, 1.0, 0.0], [0, 1, 2, 2]
    advantages, _ = group_advantages(section, credit_inputs(rewards, groups, **{HISTORY: history}))
    assert advantages.tolist() == pytest.approx([0.0, 0.0, 1.0, -1.0], abs=1e-5)
    assert {name: pooled.count for name, pooled in history.prompts.items()} == {"p1": 1, "p2": 2}


def test_returns_to_go_are_sums_over_the_rest_of_each_answer():
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    seq_ids = torch.tensor([0, 0, 0, 2, 2, 3])  # an answer without tokens between
    every = torch.ones(6, dtype=torch.bool)
    assert returns_to_go(rewards, every, seq_ids, 4).tolist() == [7, 6, 4, 24, 16, 32]


def test_returns_to_go_skip_what_is_masked_even_where_it_is_nan():
    rewards = torch.tensor([1.0, math.nan, 4.0, 8.0, math.inf])
    mask = torch.tensor([True, False, True, True, False])
    found = returns_to_go(rewards, mask, torch.tensor([0, 0, 0, 1, 1]), 2)
    assert found.dtype == torch.float64
    assert found.tolist() == [5, 0, 4, 8, 0]


def test_whitening_over_tokens_is_left_to_the_token_credit():
    plain, _ = group_advantages(AdvantageSection(), credit_inputs([1.0, 0.0, 0.0]))
    left, _ = group_advantages(AdvantageSection(post={"name": "whiten_tokens"}), credit_inputs([1.0, 0.0, 0.0]))
    clamped, _ = group_advantages(
        AdvantageSection(post={"name": "clamp", "limit": 0.5}), credit_inputs([1.0, 0.0, 0.0])
    )
    assert torch.equal(left, plain)
    assert clamped.tolist() == [0.5, -0.5, -0.5]


def test_rewards_that_wait_for_values_are_not_reported_as_advantages():
    rewards, metrics = group_advantages(AdvantageSection(center="value", scale="none"), credit_inputs([1.0, 0.0]))
    assert rewards.tolist() == [1.0, 0.0]
    assert to_floats(metrics) == {
        "advantage/zero_variance_groups": 0,
        "advantage/singleton_groups": 0,
        "advantage/unscored": 0,
    }


def test_values_are_credited_as_configured():
    advantage = AdvantageSection(center="value", scale="none", gamma=0.9, gae_lambda=0.5)
    credit = ValueCredit.of(advantage, CriticSection(init="policy", gae_lambda=1.0))
    assert credit == ValueCredit(gamma=0.9, gae_lambda=0.5, gae_alpha=None, critic_lambda=1.0)
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.2, 0.4])
    every = torch.ones(2, dtype=torch.bool)
    advantages, returns = credit(rewards, values, every, torch.zeros(2, dtype=torch.int64), 1)
    first = 0.9 * 0.4 - 0.2
    assert advantages.tolist() == pytest.approx([first + 0.9 * 0.5 * 0.6, 0.6], abs=1e-7)
    assert returns.tolist() == pytest.approx([0.9, 1.0], abs=1e-7)  # lambda 1: the discounted reward itself
    mask = torch.tensor([True, False])
    advantages, returns = credit(rewards, values, mask, torch.zeros(2, dtype=torch.int64), 1)
    assert advantages[1] == returns[1] == 0


def test_the_entropy_bonus_is_applied_only_while_the_entropy_is_low():
    section = EntropySection(place="loss", coefficient=0.01, target=0.5, step=0.002)
    coefficients = Coefficients.start(KLSection(), section)
    assert coefficients.applied_entropy == 0.01
    coefficients.adapt_entropy(0.6, section)
    assert coefficients.applied_entropy == 0.0
    assert coefficients.entropy == pytest.approx(0.008)
    coefficients.adapt_entropy(0.5, section)
    assert coefficients.applied_entropy == pytest.approx(0.01)


def test_the_kl_coefficient_moves_by_at_most_two_percent_a_step():
    section = KLSection(place="loss", coefficient=0.1, target=0.05)
    coefficients = Coefficients.start(section, EntropySection())
    coefficients.adapt_kl(0.055, section)
    assert coefficients.kl == pytest.approx(0.1 * 1.01)
    coefficients.adapt_kl(10.0, section)
    assert coefficients.kl == pytest.approx(0.1 * 1.01 * 1.02)
    coefficients.adapt_kl(0.0, section)
    assert coefficients.kl == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    coefficients.adapt_kl(10.0, KLSection())
    assert coefficients.kl == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


def test_the_only_expert_of_a_layer_has_an_even_load():
    found = to_floats(load_of_counts(torch.tensor([[7]])))
    assert found["load/entropy"] == 1.0
    assert found["load/cv"] == 0.0


def test_a_step_without_a_token_is_not_the_first_of_the_drift():
    tracker = LoadTracker()
    assert tracker.update(np.zeros((1, 2))) == {}
    assert tracker.update(np.array([[1, 3]])) == {}
    assert tracker.update(np.zeros((1, 2))) == {}
    found = to_floats(tracker.update(np.array([[3, 1]])))
    assert found["load/drift_tv"] == found["load/drift_tv_first"] == 0.5


def test_the_load_of_another_kind_of_checkpoint_is_refused():
    with pytest.raises(CheckpointError, match=r"expert-load state has the keys \['first'\], not first and previous"):
        LoadTracker().load_state_dict({"first": None})
