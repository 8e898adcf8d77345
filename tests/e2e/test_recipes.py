"""Every recipe of the demo runs, agrees with the engine before it moves, and measures what it should."""

from __future__ import annotations

import math

import pytest

from moerl.analysis.compare import compare_files

PRESETS = ("grpo", "grpo_r2", "grpo_r3", "grpo_r3_recompute", "gmpo", "rspo", "cispo", "dapo", "support", "many", "gym")


def each(*names):
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.runs(name)) for name in names])


@each(*PRESETS)
def test_it_ends_and_agrees_with_the_engine(runs, name):
    run = runs[name]
    assert run.values("contract/holds") == [1.0]
    assert max(run.values("mm/k3")) < 1e-9
    assert max(run.values("mm/logp_abs_mean")) < 1e-5
    assert max(run.values("route/expert_change")) < 1e-3
    deviations = run.values("contract/ratio_deviation")
    assert bool(deviations) == (name != "gym")  # with one minibatch the old policy is the current one
    assert max(deviations, default=0.0) <= 1e-5
    assert all(math.isfinite(value) for row in run.rows for value in row.values())
    assert run.summary["steps"] == run.rows[-1]["step"] >= 1
    assert run.stderr == ""


@each("grpo_r2", "grpo_r3", "grpo_r3_recompute")
def test_replay_covers_every_token_that_is_trained_on(runs, name):
    assert runs[name].values("route/replay_coverage") == [1.0, 1.0]


@pytest.mark.runs("grpo")
def test_no_replay_reports_none(runs):
    assert runs["grpo"].values("route/replay_coverage") == []


@pytest.mark.runs("grpo_r3", "grpo_r3_recompute")
def test_recomputation_changes_nothing(runs):
    comparison = compare_files(runs["grpo_r3"].folder, runs["grpo_r3_recompute"].folder, tolerance=1e-5)
    assert comparison.differences == []
    assert comparison.num_values > 100


@pytest.mark.runs("grpo", "gmpo", "cispo", "rspo")
def test_recipes_differ_in_what_they_do(runs):
    """The first rollouts are the same; what is learned from them is not."""
    first = {name: runs[name].rows[1] for name in ("grpo", "gmpo", "cispo", "rspo")}
    assert len({row["reward/mean"] for row in first.values()}) == 1
    assert len({row["loss"] for row in first.values()}) == len(first)


@pytest.mark.runs("rspo")
def test_router_shift_is_measured(runs):
    for row in runs["rspo"].rows[1:]:
        assert 0.9 < row["route_update/gamma_mean"] <= 1.0
        assert row["route_update/gamma_min"] <= row["route_update/gamma_p50"] <= 1.0


@pytest.mark.runs("dapo")
def test_dynamic_sampling_asks_anew_for_groups_without_spread(runs):
    rows = runs["dapo"].rows[1:]
    assert sum(row["rollout/groups_dropped"] for row in rows) > 0
    assert sum(row["rollout/refill_rounds"] for row in rows) > 0
    for row in rows:
        assert row["rollout/groups"] <= 4
        assert row["rollout/prompts_used"] == row["rollout/groups"] + row["rollout/groups_dropped"]
        assert row["advantage/zero_variance_groups"] == 0
        assert row.get("rollout/filter/zero_variance", 0.0) == row["rollout/groups_dropped"]
        assert row["reward/shaping_overlong"] <= 0


@pytest.mark.runs("support")
def test_cut_distributions_are_compared_on_their_own_support(runs):
    """Without the support the learner's logprobs would be lower by the mass that top-p cut off."""
    assert max(runs["support"].values("mm/logp_abs_max")) <= 2e-5


@pytest.mark.runs("many")
def test_a_mixture_keeps_its_shares_and_rewards_follow_the_data_set(runs):
    rows = runs["many"].rows
    assert [row["data/epoch/lines"] for row in rows[1:]] == [6 / 40, 12 / 40]
    assert [row["data/epoch/table"] for row in rows[1:]] == [2 / 40, 4 / 40]
    assert {"reward/math_verify", "reward/exact_match"} <= rows[1].keys()
    for row in (rows[0], rows[-1]):
        for kind in ("accuracy_greedy", "accuracy_sampled"):
            parts = row[f"eval/first/{kind}"], row[f"eval/second/{kind}"]
            assert row[f"eval/{kind}"] == pytest.approx((16 * parts[0] + 8 * parts[1]) / 24)


@pytest.mark.runs("gym")
def test_reasoning_gym_brings_prompts_and_its_own_score(runs):
    row = runs["gym"].rows[1]
    assert row["rollout/errors"] == 0
    assert 0.0 <= row["reward/reasoning_gym"] <= 1.0
    assert row["reward/mean"] == row["reward/reasoning_gym"]
    assert "eval/accuracy_greedy" in row
