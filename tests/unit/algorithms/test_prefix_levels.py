"""CTPO and MinPRO: ratios that look at the tokens before, against loops over tokens in float64, and TRM and VACO."""

from __future__ import annotations

import math
from types import SimpleNamespace

import conftest as v
import numpy as np
import pytest
import torch
from torch import Tensor

import moerl
from moerl.algorithms.modifiers import MODIFIERS, PresetValues
from moerl.algorithms.prefixes import min_before, positions, prefix_sum
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.shaping import build_shaping
from moerl.errors import ConfigError

SEQ_IDS = torch.tensor([0, 0, 0, 0, 1, 1, 3, 3, 3, 4])
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
VALUES = torch.tensor([0.5, 9.0, -1.0, 2.0, -0.2, -0.5, 7.0, 1.0, 0.25, 3.0], dtype=torch.float64)


def loops(combine, first) -> list[float]:
    """What `combine` makes of the live values of the sequence before each token."""
    result = []
    for i in range(len(VALUES)):
        before = [float(VALUES[j]) for j in range(i) if MASK[j] and SEQ_IDS[j] == SEQ_IDS[i]]
        result.append(combine(before) if before else first)
    return result


def test_running_numbers_stay_inside_a_sequence_and_skip_what_is_masked():
    args = (MASK, SEQ_IDS, 5)
    assert positions(*args).tolist() == [1, 1, 2, 3, 1, 2, 0, 1, 2, 0]
    assert min_before(VALUES, *args).tolist() == loops(min, 0.0)
    sums = prefix_sum(VALUES, *args)
    wanted = [a + (float(VALUES[i]) if MASK[i] else 0.0) for i, a in enumerate(loops(sum, 0.0))]
    assert sums.tolist() == pytest.approx(wanted)
    nothing = torch.zeros(0, dtype=torch.float64)
    empty = (torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), 0)
    assert [len(f(nothing, *empty)) for f in (prefix_sum, min_before)] == [0, 0]


def test_a_prefix_in_a_long_pack_has_no_rounding_of_its_neighbours():
    """In float32 a running sum of a million tokens would leave 0.01 and more."""
    values = torch.cat([torch.full((1_000_000,), 0.1), torch.tensor([1e-3, 2e-3])])
    ids = (torch.arange(len(values)) >= 1_000_000).long()
    sums = prefix_sum(values, torch.ones_like(ids, dtype=torch.bool), ids, 2)
    assert sums[-2:].tolist() == pytest.approx([1e-3, 3e-3], rel=1e-5)


def answers() -> list[range]:
    ends = v.LENGTHS.cumsum(0).tolist()
    return [range(end - int(n), end) for end, n in zip(ends, v.LENGTHS, strict=True)]


def by_loops(weight, shares: list[float]) -> tuple[float, list[float]]:
    """(loss, gradient) where `weight(d, t, a)` gives each token's (value, slope by its own logprob)."""
    loss, gradient = 0.0, []
    for answer, share, a in zip(answers(), shares, v.ADVANTAGES.tolist(), strict=True):
        d = [float(v.NOW[i] - v.OLD[i]) for i in answer]
        for t, i in enumerate(answer):
            value, slope = weight(d, t, a, float(v.NOW[i]))
            loss += share * value
            gradient.append(share * slope)
    return loss, gradient


def ctpo(d: list[float], t: int, a: float, _: float) -> tuple[float, float]:
    ratio, root = math.exp(sum(d[: t + 1])), math.sqrt(t + 1)
    low, high = math.exp(-0.025 * root), math.exp(0.05 * root)
    held = min(max(ratio, low), high)
    return -min(ratio * a, held * a), -ratio * a if ratio * a <= held * a else 0.0


def minpro(d: list[float], t: int, a: float, now: float) -> tuple[float, float]:
    weight = min(math.exp(d[t]) * min((math.exp(x) for x in d[:t]), default=1.0), 5.0)
    return -weight * a * now, -weight * a


SEQ_MEAN = [1 / (4 * n) for n in v.LENGTHS.tolist()]
PROMPT_MEAN = [1 / 12, 1 / 12, 1 / 8, 1 / 8]


@pytest.mark.parametrize(
    ("name", "weight", "shares"), [("ctpo", ctpo, SEQ_MEAN), ("minpro", minpro, PROMPT_MEAN)], ids=["ctpo", "minpro"]
)
def test_presets_are_their_formulas(batch_v, name, weight, shares):
    loss, gradient, _ = batch_v.run(PRESETS[name].values)
    wanted_loss, wanted = by_loops(weight, shares)
    assert float(loss) == pytest.approx(wanted_loss, abs=1e-12)
    assert gradient.tolist() == pytest.approx(wanted, abs=1e-12)


def test_two_tokens_by_hand():
    """Ratios 2 and 1/2: CTPO sees 2 and 1, MinPRO 2 and 1; the other way round 1/2 and 1, 1/2 and 1."""
    now = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    for first in (2.0, 0.5):
        moved = torch.tensor([math.log(first), -math.log(first)], dtype=torch.float64)
        result = moerl.objective("minpro", aggregation="token_sum")(
            logprobs=now, old_logprobs=now - moved, cu_seqlens=torch.tensor([0, 2]), advantages=torch.ones(2)
        )
        assert result.gradient.tolist() == pytest.approx([-first, -first * 1 / first])


TRM = {"name": "rs", "stat": "seq_max", "estimator": "k3", "threshold": 0.05, "policy": "current"}
VACO = {"name": "vaco", "bound": 0.1}


def sided(node: dict[str, object], shift: float) -> Tensor:
    """Gradients of one answer whose one token of three moved by `shift` from the rollout policy."""
    now = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    rollout = now - torch.tensor([0.0, shift, 0.01], dtype=torch.float64)
    return moerl.objective(correction=node)(
        logprobs=now,
        old_logprobs=now,
        rollout_logprobs=rollout,
        cu_seqlens=torch.tensor([0, 3]),
        advantages=torch.ones(3),
    ).gradient


def test_trust_region_masking_drops_the_whole_answer():
    """k3 of 0.4 is 0.0918, of 0.3 it is 0.0499: the bound of 0.05 lies between."""
    assert sided(TRM, 0.4).tolist() == [0.0, 0.0, 0.0]
    assert sided(TRM, 0.3).tolist() == pytest.approx([-1 / 3] * 3)


def test_trust_region_masking_follows_the_policy_in_training():
    """The old policy is the rollout policy; only the current one has moved."""
    old = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    now = old + torch.tensor([0.1, 0.4], dtype=torch.float64)
    batch = {
        "logprobs": now,
        "old_logprobs": old,
        "rollout_logprobs": old,
        "cu_seqlens": torch.tensor([0, 2]),
        "advantages": torch.ones(2),
    }
    clip = {"hi": 1.0}
    assert moerl.objective(trust=clip, correction=TRM)(**batch).gradient.tolist() == [0.0, 0.0]
    kept = moerl.objective(trust=clip, correction={**TRM, "policy": "old"})(**batch).gradient
    assert kept.tolist() == pytest.approx([-math.exp(0.1) / 2, -math.exp(0.4) / 2])
    with pytest.raises(ConfigError, match="not known before the update"):
        moerl.objective(correction={**TRM, "rejected": "remove"})


def test_vaco_drops_what_would_move_further():
    """Mean |u - 1| is 0.167 for a shift of 0.4: the two tokens with A c > 0 go, the one that did not move stays."""
    assert sided(VACO, 0.4).tolist() == pytest.approx([-1 / 3, 0.0, 0.0])
    assert sided(VACO, 0.2).tolist() == pytest.approx([-1 / 3] * 3)


def test_levels_of_prefixes_have_their_own_clip_only():
    with pytest.raises(ConfigError, match=r"'position_clip' needs algorithm\.level 'prefix_prod'"):
        moerl.objective("ctpo", level="token")
    with pytest.raises(ConfigError, match=r"trust\.lo is 0"):
        moerl.objective("ctpo", trust={"lo": 0.0})


@pytest.mark.parametrize("name", ["gspo_r3", "grpo_r2", "cispo_frozen", "gmpo_rs", "grpo+tis_seq", "gspo+mis_geo+r3"])
def test_names_with_modifiers_move_one_axis_each(name):
    base, *modifiers = name.split("+") if "+" in name else name.rsplit("_", 1)
    section = moerl.objective(name).section
    plain = moerl.objective(base).section
    for modifier in modifiers:
        for axis in MODIFIERS[modifier]:
            assert getattr(section, axis) != getattr(plain, axis)
    assert (section.level, section.trust) == (plain.level, plain.trust)


def test_names_that_make_no_sense_are_refused():
    known = PresetValues()
    assert len(known) == len(PRESETS)
    for name in ("grpo+nothing", "nothing+r3", "r3", "grpo_"):
        assert name not in known
    with pytest.raises(ConfigError, match="already holds the mismatch"):
        moerl.objective("vespo+tis_token")
    with pytest.raises(ConfigError, match="one weight per sequence"):
        moerl.objective("gmpo+mis_token")


@pytest.mark.parametrize(
    "axes",
    [
        {"preset": "ppo"},
        {"preset": "reinforce_pp"},
        {"preset": "grpo", "entropy": {"place": "reward", "coefficient": 0.1}},
        {"preset": "grpo", "teacher": {"path": "x", "place": "reward"}},
    ],
    ids=["critic", "kl", "entropy", "teacher"],
)
def test_a_clamp_before_the_credit_of_tokens_is_refused(axes):
    preset = axes.pop("preset")
    advantage = {"post": {"name": "clamp"}}
    with pytest.raises(ConfigError, match="after the clamp"):
        moerl.objective(preset, advantage=advantage, **axes)
    assert moerl.objective("grpo", advantage=advantage).section.advantage.post["name"] == "clamp"


def test_k1_in_the_loss_only_by_force():
    kl = {"place": "loss", "estimator": "k1", "coefficient": 0.1}
    with pytest.raises(ConfigError, match="expected gradient is 0"):
        moerl.objective(kl=kl)
    assert moerl.objective(kl={**kl, "force": True}).section.kl.force


def test_signed_makes_rewards_plus_and_minus_one():
    rewards = [1.0, 0.0, 0.3, math.nan]
    found = [SimpleNamespace(reward=reward, is_scored=not math.isnan(reward)) for reward in rewards]
    answers_ = SimpleNamespace(trajectories=found)
    shape = build_shaping([{"name": "signed"}])
    shaped, _ = shape([answers_])  # pyright: ignore[reportArgumentType]: a group needs no more than verdicts here
    assert shaped[:3].tolist() == pytest.approx([0.0, -1.0, 0.7])
    assert math.isnan(shaped[3])
    stricter, _ = build_shaping([{"name": "signed", "threshold": 0.5}])([answers_])  # pyright: ignore[reportArgumentType]
    assert (np.array(rewards) + stricter)[:3].tolist() == pytest.approx([1.0, -1.0, -1.0])
    for name in ("reinforce_rej", "raft_pp"):
        assert {"name": "signed"} in PRESETS[name].values["shaping"]


def test_a_listing_holds_the_presets_and_no_name_with_modifiers():
    assert list(PresetValues()) == list(PRESETS)
    assert len(PresetValues()) == len(PRESETS)
