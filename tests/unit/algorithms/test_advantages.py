"""Group credit: hand-checked numbers, and the laws of section "advantages"."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moerl
from moerl.algorithms.advantage import group_advantages
from moerl.algorithms.types import CreditInputs
from moerl.config.schema import AdvantageSection
from moerl.errors import ConfigError
from moerl.metrics import to_floats

FIRST = [1, 0, 0, 1, 0.2, 0.9, 0.4, 0.9]
SECOND = [1, 1, 0, 1, 0, 1, 0, 0]
TWO_GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]


def credit(cfg, rewards, group_ids, *, weights=None, shaping=None):
    table = torch.tensor(rewards, dtype=torch.float64)
    table = table.unsqueeze(1) if table.ndim == 1 else table
    n, c = table.shape
    inputs = CreditInputs(
        rewards=table,
        reward_weights=torch.tensor(weights or [1.0] * c, dtype=torch.float64),
        group_ids=torch.tensor(group_ids),
        lengths=torch.ones(n, dtype=torch.int64),
        prompt_ids=tuple(str(g) for g in group_ids),
        shaping=torch.zeros(n, dtype=torch.float64) if shaping is None else torch.tensor(shaping, dtype=torch.float64),
    )
    advantages, metrics = group_advantages(cfg, inputs)
    return advantages, to_floats(metrics)


def rank(**arguments):
    return AdvantageSection(center="none", scale="none", transform={"name": "rank", **arguments})


VECTORS = {
    "grpo ddof 0": (
        AdvantageSection(),
        "+0.999998 -0.999998 -0.999998 +0.999998 -1.297767 +0.973325 -0.648884 +0.973325",
    ),
    "grpo ddof 1": (
        AdvantageSection(std_ddof=1),
        "+0.866024 -0.866024 -0.866024 +0.866024 -1.123900 +0.842925 -0.561950 +0.842925",
    ),
    "dr_grpo": (
        AdvantageSection(scale="none"),
        "+0.500000 -0.500000 -0.500000 +0.500000 -0.400000 +0.300000 -0.200000 +0.300000",
    ),
    "rloo": (
        AdvantageSection(center="group_loo", scale="none"),
        "+0.666667 -0.666667 -0.666667 +0.666667 -0.533333 +0.400000 -0.266667 +0.400000",
    ),
    "batch mean, std raw": (
        AdvantageSection(center="batch_mean", scale="batch_std_raw"),
        "+1.075703 -1.314748 -1.314748 +1.075703 -0.836658 +0.836658 -0.358568 +0.836658",
    ),
    "lite_ppo ddof 0": (
        AdvantageSection(scale="batch_std_raw"),
        "+1.195226 -1.195226 -1.195226 +1.195226 -0.956181 +0.717135 -0.478090 +0.717135",
    ),
    "lite_ppo ddof 1": (
        AdvantageSection(scale="batch_std_raw", std_ddof=1),
        "+1.118031 -1.118031 -1.118031 +1.118031 -0.894425 +0.670819 -0.447213 +0.670819",
    ),
    "std centred": (
        AdvantageSection(scale="batch_std_centered"),
        "+1.203856 -1.203856 -1.203856 +1.203856 -0.963085 +0.722313 -0.481542 +0.722313",
    ),
    "gopo average": (
        rank(),
        "+1.333333 -1.333333 -1.333333 +1.333333 -2.000000 +1.333333 -0.666667 +1.333333",
    ),
    "gopo ordinal": (
        rank(ties="ordinal"),
        "+2.000000 -0.666667 -2.000000 +0.666667 -2.000000 +2.000000 -0.666667 +0.666667",
    ),
    "rank range 1": (
        rank(range=1.0),
        "+0.666667 -0.666667 -0.666667 +0.666667 -1.000000 +0.666667 -0.333333 +0.666667",
    ),
}

GDPO_VECTORS = {
    "sum of z": (
        {"name": "decoupled", "batch_norm": False},
        "+1.288672 -0.711324 -1.866021 +1.288672 -1.586442 +1.839349 -0.937558 +0.684651",
    ),
    "gdpo": (
        {"name": "decoupled"},
        "+0.955321 -0.527320 -1.383322 +0.955321 -1.176064 +1.363549 -0.695032 +0.507547",
    ),
    "sum_then_normalize": (
        {"name": "identity"},
        "+0.962249 -0.577349 -1.347149 +0.962249 -1.127337 +1.449433 -0.697875 +0.375779",
    ),
}

CONFIGS = {name: cfg for name, (cfg, _) in VECTORS.items()} | {
    name: AdvantageSection(transform=transform) for name, (transform, _) in GDPO_VECTORS.items()
}
GROUP_RULES = [name for name in CONFIGS if name != "batch mean, std raw"]


def numbers(text):
    return torch.tensor([float(word) for word in text.split()], dtype=torch.float64)


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name):
    cfg, line = VECTORS[name]
    advantages, _ = credit(cfg, FIRST, TWO_GROUPS)
    torch.testing.assert_close(advantages, numbers(line), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", GDPO_VECTORS)
def test_two_rewards(name):
    transform, line = GDPO_VECTORS[name]
    rewards = list(zip(FIRST, SECOND, strict=True))
    advantages, _ = credit(AdvantageSection(transform=transform), rewards, TWO_GROUPS, weights=[1.0, 0.5])
    torch.testing.assert_close(advantages, numbers(line), rtol=0, atol=2e-6)


def test_decoupled_weights_override_those_of_the_rewards():
    rewards = list(zip(FIRST, SECOND, strict=True))
    node = {"name": "decoupled", "weights": [1.0, 0.5]}
    advantages, _ = credit(AdvantageSection(transform=node), rewards, TWO_GROUPS)
    torch.testing.assert_close(advantages, numbers(GDPO_VECTORS["gdpo"][1]), rtol=0, atol=2e-6)
    with pytest.raises(ConfigError, match="weights has 3 numbers for 2 rewards"):
        credit(AdvantageSection(transform={"name": "decoupled", "weights": [1, 1, 1]}), rewards, TWO_GROUPS)


@pytest.mark.parametrize(("ddof", "size"), [(0, 0.999998), (1, 0.707106)])
def test_two_grpo(ddof, size):
    advantages, _ = credit(AdvantageSection(std_ddof=ddof), [0.9, 0.1], [0, 0])
    torch.testing.assert_close(advantages, torch.tensor([size, -size], dtype=torch.float64), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", GROUP_RULES)
def test_group_without_spread_gets_exact_zeros(name):
    rewards, groups = [1 / 3, 1 / 3, 1 / 3, 1.0, 0.0], [5, 5, 5, 2, 2]
    advantages, metrics = credit(CONFIGS[name], rewards, groups)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[3] > 0 > advantages[4]
    assert metrics["advantage/zero_variance_groups"] == 1


@pytest.mark.parametrize(("node", "size"), [({"name": "rank"}, 2.0), ({"name": "best_worst"}, 1.0)])
def test_a_group_without_spread_does_not_end_the_ranking(node, size):
    section = AdvantageSection(center="none", scale="none", transform=node)
    advantages, _ = credit(section, [0.5, 0.5, 1.0, 0.0], [0, 0, 1, 1])
    assert advantages.tolist() == [0.0, 0.0, size, -size]


@pytest.mark.parametrize(
    ("center", "scale"),
    [
        ("batch_mean", "batch_std_raw"),
        ("none", "batch_std_raw"),
        ("none", "batch_std_centered"),
        ("batch_mean", "none"),
    ],
)
def test_batch_without_spread_gets_exact_zeros(center, scale):
    """Nothing is divided by eps alone."""
    advantages, _ = credit(AdvantageSection(center=center, scale=scale), [1 / 3] * 5, [0, 0, 1, 1, 1])
    assert advantages.tolist() == [0.0] * 5


@pytest.mark.parametrize("name", GROUP_RULES)
def test_group_of_one(name):
    advantages, metrics = credit(CONFIGS[name], [0.7, 1.0, 0.0], [3, 1, 1])
    assert advantages[0] == 0
    assert metrics["advantage/singleton_groups"] == 1


def test_group_of_one_may_keep_its_raw_reward():
    advantages, _ = credit(AdvantageSection(singleton="raw"), [0.7, 1.0, 0.0], [3, 1, 1])
    assert advantages[0] == 0.7


@pytest.mark.parametrize("outlier", [0.0, 1.0, -3.0])
@pytest.mark.parametrize("equal", [1 / 3, 0.95, 7.0])
@pytest.mark.parametrize("center", ["group_mean", "group_loo"])
def test_one_outlier_among_equals_stays_bounded(center, equal, outlier):
    rewards = torch.tensor([outlier] + [equal] * 7, dtype=torch.float32).tolist()
    advantages, _ = credit(AdvantageSection(center=center), rewards, [0] * 8)
    assert advantages.isfinite().all()
    assert advantages.abs().max() <= 10
    assert torch.sign(advantages[0]) == (1 if outlier > equal else -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_unscored_rows_are_as_if_they_were_not_there(name):
    nan = float("nan")
    with_nan, metrics = credit(CONFIGS[name], [1, nan, 0, nan, 0.5, 0.2, nan, 0.9], [0, 0, 0, 0, 0, 1, 1, 1])
    without, _ = credit(CONFIGS[name], [1, 0, 0.5, 0.2, 0.9], [0, 0, 0, 1, 1])
    kept = [0, 2, 4, 5, 7]
    torch.testing.assert_close(with_nan[kept], without, rtol=0, atol=1e-12)
    assert with_nan[[1, 3, 6]].tolist() == [0.0, 0.0, 0.0]
    assert metrics["advantage/unscored"] == 3


def test_the_single_scored_row_of_a_group_gets_zero():
    advantages, _ = credit(AdvantageSection(), [1.0] + [float("nan")] * 7, [0] * 8)
    assert advantages.tolist() == [0.0] * 8


def test_a_rejected_sibling_sets_no_baseline():
    """A row that left the batch (its reward given as NaN) moves nobody: 0 in a group of itself, not -49.5."""
    advantages, _ = credit(AdvantageSection(scale="none"), [float("nan"), 1.0], [0, 0])
    assert advantages.tolist() == [0.0, 0.0]


def test_no_scored_row_at_all():
    advantages, metrics = credit(AdvantageSection(), [float("nan")] * 3, [0, 0, 1])
    assert advantages.tolist() == [0.0] * 3
    assert "advantage/mean" not in metrics


def test_constant_reward_without_center_passes_through():
    advantages, _ = credit(AdvantageSection(center="none", scale="none"), [1.0, 1.0, 1.0], [0, 0, 1])
    assert advantages.tolist() == [1.0, 1.0, 1.0]


def test_shaping_is_added_before_the_baseline():
    cfg = AdvantageSection(scale="none")
    shaped, _ = credit(cfg, [1.0, 1.0], [0, 0], shaping=[0.0, -0.5])
    torch.testing.assert_close(shaped, torch.tensor([0.25, -0.25], dtype=torch.float64))
    decoupled, _ = credit(
        AdvantageSection(transform={"name": "decoupled", "batch_norm": False}), [1.0, 1.0], [0, 0], shaping=[0.0, -0.5]
    )
    assert decoupled[0] > 0.99
    assert decoupled[1] < -0.99


def test_clamp():
    cfg = AdvantageSection(post={"name": "clamp", "limit": 0.5})
    advantages, _ = credit(cfg, FIRST, TWO_GROUPS)
    assert advantages.abs().max() == 0.5


def test_unknown_transform_says_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'rank'"):
        credit(AdvantageSection(transform={"name": "rnak"}), FIRST, TWO_GROUPS)


REWARDS = st.lists(st.integers(0, 8).map(lambda x: x / 8), min_size=6, max_size=12)


@settings(max_examples=15)
@given(rewards=REWARDS, seed=st.integers(0, 1000), name=st.sampled_from(sorted(CONFIGS)))
def test_order_of_rows_and_labels_of_groups_do_not_matter(rewards, seed, name):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 3, (len(rewards),), generator=generator)
    order = torch.randperm(len(rewards), generator=generator)
    if "ordinal" in name:
        rewards = [reward + 1e-3 * i for i, reward in enumerate(rewards)]  # ties go by position there, on purpose
    plain, _ = credit(CONFIGS[name], rewards, groups.tolist())
    relabelled = torch.tensor([77, -4, 9])[groups][order]
    shuffled, _ = credit(CONFIGS[name], [rewards[i] for i in order.tolist()], relabelled.tolist())
    torch.testing.assert_close(shuffled, plain[order], rtol=1e-9, atol=1e-9)


@settings(max_examples=10)
@given(rewards=REWARDS)
def test_invariance_to_maps_of_the_reward(rewards):
    groups = [i % 2 for i in range(len(rewards))]
    affine = [3 * reward + 2 for reward in rewards]
    for cfg in (AdvantageSection(eps=0.0), AdvantageSection(eps=0.0, transform={"name": "decoupled"})):
        torch.testing.assert_close(
            credit(cfg, affine, groups)[0], credit(cfg, rewards, groups)[0], rtol=1e-9, atol=1e-9
        )
    increasing = [reward**3 + reward for reward in rewards]
    assert torch.equal(credit(rank(), increasing, groups)[0], credit(rank(), rewards, groups)[0])


@settings(max_examples=10)
@given(rewards=REWARDS)
@pytest.mark.parametrize("name", ["grpo ddof 0", "dr_grpo", "rloo", "gopo average", "gdpo"])
def test_advantages_of_a_group_sum_to_zero(name, rewards):
    advantages, _ = credit(CONFIGS[name], rewards, [0] * len(rewards))
    assert abs(float(advantages.sum())) < 1e-8


def test_gdpo_of_components_that_cancel_is_zero_and_not_rounding_over_eps():
    rewards = torch.tensor([[0.1, 0.7], [0.4, 0.4], [0.7, 0.1], [0.3, 0.9]], dtype=torch.float64)
    advantages, _ = moerl.objective("gdpo").advantages(rewards, torch.tensor([0, 0, 0, 1]))
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]
