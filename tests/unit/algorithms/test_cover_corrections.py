"""What corrections and trust regions decide and report, in numbers that tell each comparison from its neighbours."""

from __future__ import annotations

import math

import pytest
import torch

import moerl
from moerl.algorithms.ratio import clamp_log_ratio
from moerl.algorithms.segments import masked_seq_rank, seq_lengths, seq_totals, spread


def evaluate(advantages, log_ratios=None, mismatch=None, lengths=None, **axes):
    """An objective on log-ratios to the old policy and on old-to-rollout ones; logprobs start at -3."""
    size = len(log_ratios if mismatch is None else mismatch)
    old = torch.full((size,), -3.0, dtype=torch.float64)
    now = old + torch.tensor(log_ratios or [0.0] * size, dtype=torch.float64)
    fields = {"logprobs": now, "old_logprobs": old}
    if mismatch is not None:
        fields["rollout_logprobs"] = old - torch.tensor(mismatch, dtype=torch.float64)
    return moerl.objective(**({"aggregation": {"name": "token_sum"}} | axes))(
        **fields,
        seq_ids=torch.repeat_interleave(torch.arange(len(lengths or [1] * size)), torch.tensor(lengths or [1] * size)),
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )


NONE = {"trust": {"name": "none"}}
LIKELY = {"name": "prob_reweight"}


def test_opsm_drops_bad_answers_that_the_policy_moved_away_from_and_no_others():
    """Mean of lp_rollout - lp: 0.6, 0.4, 0.6 with a good answer, -0.6."""
    result = evaluate(
        [-1.0, -1.0, 1.0, -1.0],
        mismatch=[-0.4, -0.8, -0.2, -0.6, -0.6, 0.6],
        lengths=[2, 2, 1, 1],
        correction={"name": "opsm", "delta": 0.5},
        **NONE,
    )
    assert (result.gradient != 0).tolist() == [False, False, True, True, True, True]
    assert result.metrics["mm/reject"] == pytest.approx(2 / 6)
    assert result.metrics["mm/reject_seq"] == pytest.approx(1 / 4)


def test_opsm_speaks_of_the_current_policy():
    moved = evaluate([-1.0, -1.0], [-0.6, 0.6], [0.0, 0.0], correction={"name": "opsm", "delta": 0.5}, **NONE)
    assert (moved.gradient != 0).tolist() == [False, True]


@pytest.mark.parametrize("stat", ["token", "seq_sum", "seq_mean", "seq_max"])
def test_rejection_keeps_what_lies_on_its_bound(stat):
    """On the policy itself the ratio is exactly 1, and 1 is the lower bound."""
    node = {"name": "rs", "estimator": "k1", "stat": stat, "min_ratio": 1.0, "max_ratio": 1.5}
    result = evaluate([1.0] * 4, mismatch=[0.0, -0.1, 0.1, 0.6], correction=node, **NONE)
    assert (result.gradient != 0).tolist() == [True, False, True, False]
    zero = {"name": "rs", "estimator": "k3", "stat": stat, "threshold": 0.0}
    result = evaluate([1.0] * 2, mismatch=[0.0, 0.1], correction=zero, **NONE)
    assert (result.gradient != 0).tolist() == [True, False]


def test_one_token_outside_the_band_rejects_its_sequence_by_the_maximum_in_both_directions():
    node = {"name": "rs", "estimator": "k1", "stat": "seq_max", "min_ratio": 0.5, "max_ratio": 2.0}
    result = evaluate([1.0] * 3, mismatch=[0.0, -0.8, 0.8, 0.0, 0.1, -0.1], lengths=[2, 2, 2], correction=node, **NONE)
    assert (result.gradient != 0).tolist() == [False] * 4 + [True] * 2


def test_what_truncated_weights_report():
    mismatch = [0.0, math.log(2.0), math.log(3.0), -1.0]
    for name in ("tis", "seq_mask_tis"):
        result = evaluate([1.0] * 4, mismatch=mismatch, lengths=[4], correction={"name": name, "cap": 2.5}, **NONE)
        assert result.metrics["mm/tis_clip"] == 0.25, name
        assert result.gradient.tolist() == pytest.approx([-1.0, -2.0, -2.5, -math.exp(-1.0)], rel=1e-12)


def test_normalised_weights_have_mean_1_over_what_is_kept():
    mismatch = [0.0, math.log(2.0), -1.0, 3.0]
    for node in ({"name": "tis", "cap": 1.5}, {"name": "mis", "max": 2.5}):
        result = evaluate([1.0] * 4, mismatch=mismatch, correction={**node, "batch_normalize": True}, **NONE)
        u = [math.exp(m) for m in mismatch]
        kept = [min(x, 1.5) for x in u] if node["name"] == "tis" else [x if x <= 2.5 else 0.0 for x in u]
        mean = sum(kept) / sum(x > 0 for x in kept)
        assert result.gradient.tolist() == pytest.approx([-x / mean for x in kept], rel=1e-12), node


def test_vespos_kernel_takes_the_weights_inside_its_ratio():
    mismatch, log_ratios = [0.3, -0.2, 0.5], [0.1, 0.2, -0.4]
    result = evaluate(
        [1.0, -1.0],
        log_ratios,
        mismatch,
        lengths=[2, 1],
        level="seq_prod",
        form="score",
        trust={"name": "gamma_kernel", "k_pos": 2.0, "lam_pos": 3.0, "k_neg": 1.5, "lam_neg": 2.0},
        correction={"name": "tis", "cap": 1.2},
    )
    weights = [min(math.exp(m), 1.2) for m in mismatch]
    first = math.exp(0.3) * weights[0] * weights[1]
    second = math.exp(-0.4) * weights[2]
    good, bad = first**2 * math.exp(3 * (1 - first)), second**1.5 * math.exp(2 * (1 - second))
    assert result.gradient.tolist() == pytest.approx([-good, -good, bad], rel=1e-12)


def test_pure_rejection_has_weight_1_inside_its_band():
    for weight, inside in (("ratio", math.exp(0.5)), ("one", 1.0)):
        node = {"name": "mis", "max": 2.0, "weight": weight}
        result = evaluate([1.0, 1.0], mismatch=[0.5, 0.8], correction=node, **NONE)
        assert result.gradient.tolist() == pytest.approx([-inside, 0.0], rel=1e-12)


@pytest.mark.parametrize("node", [{"name": "mis"}, {"name": "icepop"}, {"name": "seq_mask_tis"}])
@pytest.mark.parametrize(("low", "high"), [(0.5, 1.0), (1.0, 2.0)])
def test_a_band_has_its_ends(node, low, high):
    """On the policy itself the ratio is exactly 1."""
    result = evaluate([1.0], mismatch=[0.0], correction={**node, "min": low, "max": high}, **NONE)
    assert result.gradient.tolist() == [-1.0]
    assert result.metrics["mm/reject"] == 0


LOG_RATIOS = [0.0, 0.5, 0.1, -0.1, -0.5, 0.5, -0.5]
ADVANTAGES = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0]


def test_gmpo_counts_what_was_held_by_side():
    result = evaluate(ADVANTAGES, LOG_RATIOS, level="geo_clip", trust={"name": "log_clip", "lo": 0.4, "hi": 0.4})
    assert result.metrics["pg/clip_high"] == pytest.approx(1 / 7)  # 0.5 where A > 0
    assert result.metrics["pg/clip_low"] == pytest.approx(1 / 7)  # -0.5 where A < 0
    assert result.metrics["pg/clamped"] == 0


def test_cispo_counts_what_was_capped_on_either_side():
    cap = {"name": "is_clip", "min": 0.8, "max": 1.2}
    result = evaluate(ADVANTAGES, LOG_RATIOS, form="score", trust=cap)
    assert result.metrics["pg/clip_high"] == pytest.approx(2 / 7)
    assert result.metrics["pg/clip_low"] == pytest.approx(2 / 7)
    weights = [min(max(math.exp(d), 0.8), 1.2) for d in LOG_RATIOS]
    wanted = [-w * a for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert result.gradient.tolist() == pytest.approx(wanted, rel=1e-12)


def test_the_unified_mask_drops_only_where_the_clip_would():
    cap = {"name": "is_clip", "min": 0.8, "max": 1.2, "mask": True}
    result = evaluate([*ADVANTAGES, 0.0, 0.0], [*LOG_RATIOS, 0.5, -0.5], form="score", trust=cap)
    assert result.metrics["pg/clip_high"] == pytest.approx(1 / 9)
    assert result.metrics["pg/clip_low"] == pytest.approx(1 / 9)
    assert (result.gradient != 0).tolist() == [True, False, True, True, False, True, True, False, False]


SCORE = {"form": "score"}
REGIONS = {
    "clip": {"trust": {"name": "clip"}},
    "dual clip and delta": {"trust": {"name": "clip", "dual_c": 1.5, "delta": 1.4}},
    "gmpo": {"level": "geo_clip", "trust": {"name": "log_clip"}},
    "cispo": {**SCORE, "trust": {"name": "is_clip", "min": 0.8, "max": 1.2, "mask": True}},
    "minirl": {**SCORE, "trust": {"name": "ratio_mask"}},
    "dppo": {**SCORE, "anchor": "rollout", "trust": {"name": "div_mask", "delta": 0.01}},
    "dppo, both sides": {
        **SCORE,
        "anchor": "rollout",
        "trust": {"name": "div_mask", "delta": 0.01, "one_sided": False},
    },
    "dcpo": {"trust": {"name": "dyn_clip", "dual_c": 1.5}},
    "sapo": {"trust": {"name": "soft_gate"}},
    "ctpo": {"level": "prefix_prod", "trust": {"name": "position_clip"}},
    "vespo": {**SCORE, "level": "seq_prod", "trust": {"name": "gamma_kernel", "k_neg": 1.5}},
}


@pytest.mark.parametrize("name", REGIONS)
def test_of_an_advantage_a_trust_region_reads_the_sign_and_its_size_is_a_factor(name):
    log_ratios = [*LOG_RATIOS, 1.0, -1.0]
    signs = [*ADVANTAGES, -1.0, 1.0]
    unit = evaluate(signs, log_ratios, [0.0] * 9, **REGIONS[name])
    for size in (0.25, 4.0):
        sized = evaluate([size * sign for sign in signs], log_ratios, [0.0] * 9, **REGIONS[name])
        assert (sized.gradient / size).tolist() == pytest.approx(unit.gradient.tolist(), rel=1e-12)
        assert sized.metrics == pytest.approx(unit.metrics, rel=1e-12)


@pytest.mark.parametrize(("low", "high"), [(-25.0, 3.0), (-3.0, 25.0), (-20.0, 25.0), (-25.0, 20.0), (-25.0, 25.0)])
def test_a_log_ratio_is_held_on_each_side_alone(low, high):
    values = torch.tensor([low, 0.5, high], dtype=torch.float64, requires_grad=True)
    held = clamp_log_ratio(values)
    assert held.tolist() == [max(low, -20.0), 0.5, min(high, 20.0)]
    held.sum().backward()
    assert values.grad is not None
    expected = [float(low >= -20.0), 1.0, float(high <= 20.0)]
    at_the_kink = [abs(value) == 20.0 for value in values.tolist()]  # where versions of torch differ
    assert all(kink or got == want for kink, got, want in zip(at_the_kink, values.grad.tolist(), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_of_sequences_in_every_dtype(dtype):
    values = torch.tensor([1.0, 2.0, 4.0, 0.5, 8.0], dtype=dtype)
    seq_ids = torch.tensor([0, 0, 2, 2, 3])
    lengths = seq_lengths(seq_ids, 5)
    assert lengths.tolist() == [2, 0, 2, 1, 0]
    totals = seq_totals(values, seq_ids, lengths)
    assert totals.dtype == dtype
    assert totals.tolist() == [3.0, 0.0, 4.5, 8.0, 0.0]
    assert spread(totals, seq_ids, lengths).tolist() == [3.0, 3.0, 4.5, 4.5, 8.0]


def test_ranks_of_equals_go_by_position():
    size = 400
    seq_ids = torch.arange(size) // 100
    rank = masked_seq_rank(torch.zeros(size), torch.ones(size, dtype=torch.bool), seq_ids)
    assert rank.tolist() == [i % 100 for i in range(size)]
    values = torch.tensor([1.0, 3.0, 2.0, 3.0])
    one = torch.zeros(4, dtype=torch.int64)
    assert masked_seq_rank(values, torch.tensor([True, True, True, False]), one).tolist() == [2, 0, 1, 3]


def test_pairs_that_do_not_differ_are_not_told_apart():
    same = torch.full((4,), -1.0, dtype=torch.float64)
    result = moerl.objective("group_dpo")(
        logprobs=same.clone(),
        ref_logprobs=same,
        seq_ids=torch.tensor([0, 0, 1, 1]),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
    )
    assert result.metrics["dpo/margin"] == 0
    assert result.metrics["dpo/accuracy"] == 0
    assert result.loss.item() == pytest.approx(math.log(2.0), rel=1e-12)


@pytest.mark.parametrize(
    ("axes", "needs"),
    [
        (
            {
                "level": "none",
                "form": "score",
                "correction": {"name": "tis"},
                "token_weight": {"name": "prob_reweight"},
            },
            ("old_logprobs", "rollout_logprobs"),
        ),
        ({"token_weight": {"name": "prob_reweight"}}, ("old_logprobs",)),
        ({"correction": {"name": "tis"}}, ("old_logprobs", "rollout_logprobs")),
    ],
)
def test_a_field_that_two_parts_read_is_declared(axes, needs):
    assert moerl.objective(**NONE, **axes).needs == needs
