"""Advantages, returns and removal of every method equal the oracle's, from the rewards of random ragged batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_batches import joined, make_batch, tensors
from oracle_credit import BATCH, CREDITS, GROUP, RAW, Credit, Memory, decoupled, plain, ranked
from oracle_methods import METHODS, Method, gradient, loss
from oracle_numbers import derivative
from oracle_product import of_axes, preset
from oracle_shares import Shares, group_dpo
from oracle_terms import band, reject, tis, token_clip

import moerl
from moerl.algorithms import registries
from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.advantage.history import HISTORY, PromptHistory
from moerl.algorithms.compose import CHOICES
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.types import CreditInputs
from moerl.algorithms.values import value_loss
from moerl.api_credit import BatchCredit
from moerl.config.schema import AdvantageSection
from moerl.data.token_batch import TokenBatch

CLIP = token_clip(0.2, 0.2)
VALUE = {"critic": {"init": "policy"}}


def center(name, scale="none", **more):
    return {"advantage": {"center": name, "scale": scale, **more}}


def transformed(**node):
    return {"advantage": {"center": "none", "scale": "none", "transform": node}}


GRID = {
    f"{c}, {s}, ddof {ddof}, {single}": (
        center(c, s, std_ddof=ddof, singleton=single),
        Credit(plain(c, s, ddof, single=single)),
    )
    for c, s, ddof, single in itertools.product(
        ("none", "group_mean", "group_loo", "batch_mean"),
        ("none", "group_std", "batch_std_raw", "batch_std_centered"),
        (0, 1),
        ("zero", "raw"),
    )
}
CASES = {
    "eps": (center("group_mean", "group_std", eps=0.1), Credit(plain("group_mean", "group_std", eps=0.1))),
    "ranks by position": (transformed(name="rank", ties="ordinal"), Credit(ranked(2.0, by_position=True))),
    "ranks within one": (transformed(name="rank", range=1.0), Credit(ranked(1.0))),
    "components": (
        {"advantage": {"transform": {"name": "decoupled", "weights": [1.0, 0.5]}}},
        Credit(decoupled([1.0, 0.5])),
    ),
    "components, no batch norm": (
        {"advantage": {"transform": {"name": "decoupled", "batch_norm": False}}},
        Credit(decoupled([1.0, 1.0], batch_norm=False)),
    ),
    "clamp": (
        {"advantage": {"post": {"name": "clamp", "limit": 0.9}}},
        dataclasses.replace(GROUP, limit=0.9),
    ),
    "whitened groups": ({"advantage": {"post": {"name": "whiten_tokens"}}}, dataclasses.replace(GROUP, whiten=True)),
    "entropy": ({"entropy": {"place": "reward", "coefficient": 0.2}}, dataclasses.replace(GROUP, entropy=0.2)),
    "teacher": (
        {"teacher": {"path": "t", "place": "reward", "coefficient": 0.3}},
        dataclasses.replace(GROUP, teacher=0.3),
    ),
    "kl in the answer's reward": (
        {"kl": {"place": "reward", "estimator": "k1", "coefficient": 0.2}},
        dataclasses.replace(GROUP, kl=0.2),
    ),
    "kl in tokens' returns": (
        {**center("none"), "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.2}},
        dataclasses.replace(RAW, kl=0.2, per_token=True),
    ),
    "entropy beside kl in tokens' returns": (
        {
            **center("none"),
            "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.2},
            "entropy": {"place": "reward", "coefficient": 0.2},
        },
        dataclasses.replace(RAW, kl=0.2, per_token=True, entropy=0.2),
    ),
    "gae": (
        {**VALUE, **center("value", gae_lambda=0.5, gamma=0.9), "entropy": {"place": "reward", "coefficient": 0.1}},
        Credit(lam=lambda n: 0.5, gamma=0.9, entropy=0.1),
    ),
    "a critic of its own lambda": (
        {"critic": {"init": "policy", "gae_lambda": 0.8}, **center("value", gae_alpha=0.5)},
        Credit(lam=lambda n: max(0.0, 1 - 1 / (0.5 * n)) if n else 0.0, critic_lam=0.8),
    ),
}
COVERED = {
    "transform": {"identity", "rank", "decoupled", "sas", "best_worst"},
    "post": {"none", "clamp", "whiten_tokens"},
}


@functools.cache
def product(name):
    return preset(name) if name in CREDITS else of_axes(CASES[name][0])


def credit_of(name) -> Credit:
    return CREDITS[name] if name in CREDITS else CASES[name][1]


def flat(rows):
    return torch.tensor([a for row in rows for a in row], dtype=torch.float64)


def unscored(batch, seed):
    """With one component of some answers missing."""
    rng = random.Random(seed)
    return [dataclasses.replace(s, rewards=[math.nan, s.rewards[1]]) if rng.random() < 0.2 else s for s in batch]


def test_every_preset_has_an_oracle_of_its_credit():
    missing = sorted(set(PRESETS) - set(CREDITS))
    assert not missing, f"presets without an independent definition of their advantages: {missing}; see oracle_credit"
    assert not set(CREDITS) - set(PRESETS)


def test_every_part_of_the_credit_has_an_oracle():
    for axis, registry in (("transform", registries.advantage_transforms), ("post", registries.advantage_posts)):
        own = {name for name in registry.names() if registry.get(name).target.__module__.startswith("moerl.")}
        assert own == COVERED[axis], f"{axis} without a formula in oracle_credit: {own - COVERED[axis]}"
    aggregations = {
        n
        for n in registries.aggregations.names()
        if registries.aggregations.get(n).target.__module__.startswith("moerl.")
    }
    known = {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_denominator", "prompt_mean"}
    assert aggregations == known | {"seq_sum_token_mean", "token_sum"}
    assert set(CHOICES["advantage.center"]) == {"none", "group_mean", "group_loo", "batch_mean", "history", "value"}
    assert set(CHOICES["advantage.scale"]) == {"none", "group_std", "batch_std_raw", "batch_std_centered"}


@pytest.mark.parametrize("name", [*CREDITS, *CASES])
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_advantages(name, seed):
    batch = make_batch(f"{name} {seed}", "wild")
    credit = credit_of(name)
    if not (credit.whiten or credit.per_token or credit.rule is None):
        batch = unscored(batch, seed)
    found = product(name)(**tensors(batch, torch.float64, skip=("advantages",)))
    mask = torch.tensor([on for s in batch for on in s.mask])
    torch.testing.assert_close(found.advantages[mask], flat(credit(batch))[mask], rtol=1e-9, atol=1e-11)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_every_center_and_scale(seed):
    batch = unscored(make_batch(seed, "calm"), seed)
    rewards, groups = [s.rewards for s in batch], [s.group for s in batch]
    n = len(batch)
    inputs = CreditInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        reward_weights=torch.ones(2, dtype=torch.float64),
        group_ids=torch.tensor(groups),
        lengths=torch.ones(n, dtype=torch.int64),
        prompt_ids=tuple(map(str, groups)),
        shaping=torch.zeros(n, dtype=torch.float64),
    )
    for name, (axes, credit) in GRID.items():
        found, _ = group_advantages(AdvantageSection(**axes["advantage"]), inputs)
        assert found.tolist() == pytest.approx(credit.rule(rewards, groups), rel=1e-9, abs=1e-11), name


@pytest.mark.parametrize("name", CREDITS)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_from_rewards_to_the_gradient(name, seed):
    """The whole of a method, advantages included."""
    batch = make_batch(f"{name} {seed}", "wild")
    credited = [dataclasses.replace(s, advantage=row) for s, row in zip(batch, CREDITS[name](batch), strict=True)]
    found = product(name)(**tensors(batch, torch.float64, skip=("advantages",)))
    wanted = flat(gradient(METHODS[name], credited))
    assert float(found.loss.detach()) == pytest.approx(float(loss(METHODS[name], credited).real), rel=1e-9, abs=1e-10)
    torch.testing.assert_close(found.gradient, wanted, rtol=1e-8, atol=1e-11)


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32), norm=st.booleans())
def test_pairs_by_length(seed, norm):
    batch = make_batch(seed, "wild")
    batch = [dataclasses.replace(s, advantage=r) for s, r in zip(batch, CREDITS["group_dpo"](batch), strict=True)]
    method = moerl.objective("group_dpo", objective={"name": "group_dpo", "beta": 0.7, "length_norm": norm})
    found = method(**tensors(batch, torch.float64, skip=("advantages",)))
    wanted = derivative(lambda moved: group_dpo(moved, 0.7, length_norm=norm), batch)
    torch.testing.assert_close(found.gradient, flat(wanted), rtol=1e-9, atol=1e-12)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_statistics_of_prompts_over_visits_of_any_size(seed):
    """DCPO, five steps; a visit without a scored answer is none."""
    rng = random.Random(seed)
    memory, state = Memory(), {HISTORY: PromptHistory()}
    section = AdvantageSection(center="history", scale="group_std", transform={"name": "sas"})
    for _ in range(5):
        groups = [rng.randrange(3) for _ in range(rng.randint(2, 9))]
        rewards = [[rng.choice((0.0, 0.25, 1.0, 1.0, math.nan))] for _ in groups]
        n = len(groups)
        inputs = CreditInputs(
            rewards=torch.tensor(rewards, dtype=torch.float64),
            reward_weights=torch.ones(1, dtype=torch.float64),
            group_ids=torch.tensor(groups),
            lengths=torch.ones(n, dtype=torch.int64),
            prompt_ids=tuple(map(str, groups)),
            shaping=torch.zeros(n, dtype=torch.float64),
            state=state,
        )
        found, _ = group_advantages(section, inputs)
        wanted = torch.tensor(memory(rewards, groups), dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in (*CREDITS, *CASES) if credit_of(name).rule is None])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_targets_of_the_critic(name, seed):
    batch = make_batch(f"{name} {seed}", "calm")
    method = product(name)
    micro, _ = BatchCredit(method.section, method.objective)(
        TokenBatch.from_tensors(tensors(batch, torch.float64, skip=("advantages",)))
    )
    for i, s in enumerate(batch):
        wanted = credit_of(name).returns(s)
        found = micro.returns[micro.seq_ids == i]
        assert {t: float(found[t]) for t in wanted} == pytest.approx(wanted, rel=1e-9, abs=1e-11)


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_lambda_of_vapo_grows_with_the_answer(seed):
    """Answers of some twenty to seventy live tokens, for which it is above 0."""
    batch = [joined([s for i in range(count) for s in make_batch(seed + i, "calm")]) for count in (2, 4)]
    found = preset("vapo")(**tensors(batch, torch.float64, skip=("advantages",)))
    mask = torch.tensor([on for s in batch for on in s.mask])
    wanted = flat(CREDITS["vapo"](batch))[mask]
    torch.testing.assert_close(found.advantages[mask], wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("clip", [None, 0.2])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_loss_of_the_critic(clip, seed):
    """0.5 max((V - R)^2, (V_old + clip(V - V_old) - R)^2), in value and slope."""
    rng = random.Random(seed)
    rows = [[rng.gauss(0, 0.5) for _ in range(3)] for _ in range(8)]
    new, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    new.requires_grad_()
    found, _ = value_loss(new, old, target, clip=clip)
    (slope,) = torch.autograd.grad(found.sum(), new)
    for (v, v_old, r), have, tangent in zip(rows, found.tolist(), slope.tolist(), strict=True):
        free = (0.5 * (v - r) ** 2, v - r)
        kept = v if clip is None else min(max(v, v_old - clip), v_old + clip)
        bound = (0.5 * (kept - r) ** 2, v - r if kept == v else 0.0)
        wanted = bound if bound[0] > free[0] else free
        assert (have, tangent) == pytest.approx(wanted, abs=1e-14)


REMOVED = {
    "icepop": ({"name": "icepop"}, band("token", 0.5, 5.0)),
    "mis seq": ({"name": "mis", "level": "seq", "min": 0.5}, band("seq", 0.5, 2.0)),
    "mis one": ({"name": "mis", "max": 1.5, "weight": "one"}, band("token", 0.0, 1.5, weighs=False)),
    "rs": ({"name": "rs", "threshold": 0.2}, reject("seq_mean", "k3", 0.2)),
    "tis, missing logprobs": ({"name": "tis"}, tis("token", 2.0)),
}
BASES = {
    "grpo": ({}, GROUP, Shares("seq_mean_token_mean")),
    "batch": (
        {**center("batch_mean", "batch_std_raw"), "aggregation": {"name": "token_mean"}},
        BATCH,
        Shares("token_mean"),
    ),
    "prompts": ({"aggregation": {"name": "prompt_mean"}}, GROUP, Shares("prompt_mean")),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", REMOVED)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_what_is_removed_is_as_if_it_had_never_been_there(name, base, seed):
    """The batch is cut by hand: rejected tokens lose their mask, an answer without any left loses its reward."""
    node, correct = REMOVED[name]
    axes, credit, share = BASES[base]
    rng = random.Random(seed)
    batch = make_batch(f"{name} {seed}", "wild")
    batch = [dataclasses.replace(s, roll=[math.nan if rng.random() < 0.1 else x for x in s.roll]) for s in batch]
    method = of_axes({**axes, "correction": {**node, "rejected": "remove"}})
    found = method(**tensors(batch, torch.float64, skip=("advantages",)))
    cut, weights = [], []
    for s in batch:
        verdict = correct(s, s.usable(reads_roll=True))
        weights.append({t: w for t, (w, k) in verdict.items() if k})
        gone = any(s.mask) and not weights[-1]
        mask = [t in weights[-1] for t in range(len(s.mask))]
        cut.append(dataclasses.replace(s, mask=mask, rewards=[math.nan, 0.0] if gone else s.rewards))
    cut = [dataclasses.replace(s, advantage=row) for s, row in zip(cut, credit(cut), strict=True)]
    own = {id(s): w for s, w in zip(cut, weights, strict=True)}
    plain_method = Method(CLIP, share)
    total = sum(
        v * sum(own[id(s)][t] * x for t, x in CLIP(s, s.live()).items())
        for s, v in zip(cut, plain_method.share(cut), strict=True)
    )
    assert float(found.loss.detach()) == pytest.approx(total, rel=1e-9, abs=1e-11)
