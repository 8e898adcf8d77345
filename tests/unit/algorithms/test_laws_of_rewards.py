"""Laws of credit for every preset: maps of the reward, answers of one token, groups of one and without spread."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle_batches import make_batch, tensors
from oracle_credit import BATCH, BY_NAME, CENTRED, CREDITS, GROUP, RAW, SCALED, SLIME, TRL, VERL, decoupled, spread
from oracle_methods import METHODS
from oracle_product import evaluate, loss_inputs, preset

import moerl

SEEDS = st.integers(0, 2**32)
PLAIN_RULES = [name for name, c in CREDITS.items() if c.rule is not None and not (c.kl or c.whiten)]
RANKS = ["gopo", "group_dpo"]
SCALE_FREE = [name for name in PLAIN_RULES if CREDITS[name] in (GROUP, BATCH, SCALED, TRL, SLIME)]
SCALE_FREE += [*RANKS, "lite_ppo", "gdpo", "dcpo"]
SHIFT_FREE = [*SCALE_FREE, *BY_NAME[CENTRED], "reinforce_pp_loo", "trl/dr_grpo"]
OF_GROUPS = [name for name in PLAIN_RULES if name not in (*BY_NAME[RAW], *BY_NAME[BATCH])]


def advantages(name, batch):
    """[n]: one number for each answer; None where no token shows it."""
    found = preset(name)(**tensors(batch, torch.float64, skip=("advantages",)))
    bounds = torch.tensor([0, *(len(s.mask) for s in batch)]).cumsum(0).tolist()
    rows = [found.advantages[a:b] for a, b in itertools.pairwise(bounds)]
    return [float(row[s.mask.index(True)]) if any(s.mask) else None for row, s in zip(rows, batch, strict=True)]


def one_reward(batch, change):
    return [dataclasses.replace(s, rewards=[change(s.rewards[0])]) for s in batch]


def same(found, wanted, tolerance):
    assert [x for x in found if x is not None] == pytest.approx([x for x in wanted if x is not None], abs=tolerance)


@pytest.mark.parametrize("name", SCALE_FREE)
@settings(max_examples=2)
@given(seed=SEEDS)
def test_a_positive_affine_map_of_the_reward_changes_nothing(name, seed):
    """But for eps beside a standard deviation, which is small against both."""
    batch = make_batch(f"{name} {seed}", "calm")
    wanted = advantages(name, one_reward(batch, lambda r: 1000 * r))
    same(advantages(name, one_reward(batch, lambda r: 4000 * r + 5)), wanted, 1e-5)


@pytest.mark.parametrize("name", SHIFT_FREE)
@settings(max_examples=1)
@given(seed=SEEDS)
def test_a_constant_added_to_every_reward_changes_nothing(name, seed):
    batch = make_batch(f"{name} {seed}", "calm")
    same(advantages(name, one_reward(batch, lambda r: r + 7)), advantages(name, one_reward(batch, float)), 1e-9)


@pytest.mark.parametrize("name", RANKS)
@settings(max_examples=3)
@given(seed=SEEDS)
def test_an_increasing_map_of_the_reward_does_not_change_ranks(name, seed):
    batch = make_batch(f"{name} {seed}", "calm")
    assert advantages(name, one_reward(batch, math.exp)) == advantages(name, one_reward(batch, lambda r: r**3 + r))


@settings(max_examples=5)
@given(seed=SEEDS)
def test_gdpo_does_not_see_an_affine_map_of_each_component(seed):
    batch = make_batch(seed, "calm")
    big, moved = (
        [dataclasses.replace(s, rewards=[a * s.rewards[0] + c, b * s.rewards[1] - c]) for s in batch]
        for a, b, c in ((1e3, 1e3, 0.0), (5e3, 2e3, 3.0))
    )
    sums = decoupled([1.0, 1.0], batch_norm=False)([s.rewards for s in big], [s.group for s in big])
    assume(spread(sums, 0) > 1e-2)  # components that cancel leave nothing but eps to divide by
    same(advantages("gdpo", moved), advantages("gdpo", big), 1e-5)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_groups_of_one_and_without_spread_have_advantage_zero(name):
    """One answer in group 3 (a convention keeps its reward), three equal ones in group 40, two unequal in 41."""
    batch = [s for seed in range(4) for s in make_batch(seed, "calm") if any(s.mask)][:6]
    rewards, groups = (0.7, 1 / 3, 1 / 3, 1 / 3, 1.0, 0.0), (3, 40, 40, 40, 41, 41)
    batch = [dataclasses.replace(s, rewards=[r], group=g) for s, r, g in zip(batch, rewards, groups, strict=True)]
    found = advantages(name, batch)
    keeps_reward = CREDITS[name] is VERL or name == "verl/dr_grpo"
    assert found[0] == (0.7 if keeps_reward else 0.0)
    assert found[1:4] == [0.0, 0.0, 0.0]
    assert found[4] > 0 > found[5]


BOUNDS_OF_GMPO = {"name": "clip", "lo": 1 - math.exp(-0.4), "hi": math.exp(0.4) - 1}
LENGTH_ONE = ("gspo", "gspo_token", "luspo", "gmpo", "rspo", "gspo_rs", "trl/gspo", "verl/gspo", "slime/gspo")


def first_tokens(batch):
    """Every answer cut to one live token."""
    short = []
    for s in batch:
        at = s.mask.index(True) if any(s.mask) else 0
        cut = {n: getattr(s, n)[at : at + 1] for n in vars(s) if isinstance(getattr(s, n), list) and n != "rewards"}
        short.append(dataclasses.replace(s, **cut))
    return short


@pytest.mark.parametrize("name", LENGTH_ONE)
@settings(max_examples=3)
@given(seed=SEEDS)
def test_of_an_answer_of_one_token_the_sequence_is_the_token(name, seed):
    """Ratios of whole answers, in value and gradient, are then the token's: as the token level with the same clip."""
    batch = first_tokens(make_batch(f"{name} {seed}", "wild"))
    section = preset(name).section
    if section.level == "geo_clip":
        section = dataclasses.replace(
            section, trust={"name": "clip", "lo": 1 - math.exp(-0.4), "hi": math.exp(0.4) - 1}
        )
    token = dataclasses.replace(section, level="token")
    ours, theirs = preset(name), moerl.objective(token)
    x = loss_inputs(ours, batch)
    (loss_a, grad_a, _), (loss_b, grad_b, _) = evaluate(ours, x), evaluate(theirs, x)
    torch.testing.assert_close(loss_a, loss_b, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad_a, grad_b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_gae_of_one_token_is_the_reward_less_the_value(name):
    section = preset(name).section
    plain = dataclasses.replace(
        section,
        advantage=dataclasses.replace(section.advantage, post={"name": "none"}),
        kl=dataclasses.replace(section.kl, place="none", coefficient=0.0),
    )
    batch = [s for s in first_tokens(make_batch(5, "calm", garbage=False)) if any(s.mask)]
    found = moerl.objective(plain)(**tensors(batch, torch.float64, skip=("advantages",))).advantages
    assert found.tolist() == pytest.approx([s.reward - s.values[0] for s in batch])


@settings(max_examples=10)
@given(seed=SEEDS)
def test_lopti_trains_every_token_once_and_keeps_the_shares_of_all(seed):
    """At one and the same policy its two updates add up to the joint loss; the rare tokens come first."""
    rng = random.Random(seed)
    method = preset(rng.choice(("lopti", "ar_lopti")))
    x = loss_inputs(method, make_batch(seed, "wild"))
    joint, gradient, _ = evaluate(method, x)
    rare = x.optional["old_logprobs"].exp() < 0.5
    first, second = (evaluate(method, dataclasses.replace(x, mask=x.mask & chosen)) for chosen in (rare, ~rare))
    torch.testing.assert_close(first[0] + second[0], joint, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(first[1] + second[1], gradient, rtol=1e-12, atol=1e-15)


def test_every_preset_is_in_some_law_of_rewards_or_has_none():
    """What is in none has no center, or credits tokens."""
    without = set(METHODS) - set(SHIFT_FREE) - set(OF_GROUPS) - set(BY_NAME[BATCH])
    assert without == {*BY_NAME[RAW], "rloo", "reinforce_pp", "ppo", "vapo"}
