"""`moerl train` over servers by other methods than GSPO: a critic, R2, a filter that refills, and sampling ahead."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from served_runs import SERVED, SMALL, engine_of

from moerl.rollout.fake_engine.serving import FakeServer

STEPS, PROMPTS, SAMPLES = 3, 4, 16
SLOW = replace(SERVED, token_seconds=0.05)
"""So that an update comes amid answers."""


def trained(stage: Any, recipe: str, *overrides: str, name: str, cfg: Any = SERVED) -> tuple[Any, dict[str, Any]]:
    """The finished run, and what its server saw."""
    with FakeServer(cfg) as server:
        reward = "reward.rewards=[{name: 'drawn_reward:drawn'}]"
        chosen = [*SMALL, engine_of([server.url]), reward, *overrides]
        run = stage.moerl.train(f"configs/demo/{recipe}.yaml", *chosen, name=name)
        return run, server.state()


def critic(stage):
    return trained(stage, "ppo", name="served_ppo")


def replayed(stage):
    return trained(stage, "grpo_r2", name="served_r2")


def filtered(stage):
    """Every second group, about, has equal rewards."""
    drawn = ("algorithm.filters=[{name: zero_variance}]", "algorithm.refill_rounds=9", "rollout.group_size=2")
    return trained(stage, "grpo", *drawn, name="served_filtered")


def resuming(stage):
    late = ("rollout.max_staleness=1", "rollout.long_tail=resume", "run.num_steps=5")
    return trained(stage, "grpo", *late, name="served_ahead", cfg=SLOW)


def steps_of(run: Any, num_steps: int = STEPS) -> list[dict[str, Any]]:
    """Rows of a run that went as planned: it ended well, and every step trained on all its groups."""
    rows = run.expect(0).rows[1:]
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    for row in rows:
        assert row["rollout/groups"] == PROMPTS
        assert row["rollout/errors"] == row["rollout/aborted"] == row["engine/bad_answers"] == 0
    return rows


def prompts_of(run: Any) -> dict[int, list[str]]:
    """Step -> ids of the prompts that were sampled for it."""
    lines = (run.folder / "pass_rates.jsonl").read_text().splitlines()
    found = itertools.groupby(map(json.loads, lines), lambda row: row["step"])
    return {step: [row["prompt_id"] for row in rows] for step, rows in found}


@pytest.mark.runs.with_args(critic)
def test_a_critic(runs):
    run, seen = runs[critic]
    for row in steps_of(run):
        assert row["engine/completions"] == SAMPLES
        assert row["rollout/staleness_mean"] == 0
        assert row["optim/grad_norm"] > 0
        assert row["critic/loss"] > 0
        assert row["critic/grad_norm"] > 0
    assert seen["label"] == str(STEPS)
    assert seen["counts"]["route_rows"] == 0, "nobody asks for routes"


@pytest.mark.runs.with_args(replayed)
def test_r2_replays_the_learners_own_routes(runs):
    run, seen = runs[replayed]
    for row in steps_of(run):
        assert row["engine/completions"] == SAMPLES
        assert row["rollout/staleness_mean"] == 0
        assert row["route/replay_coverage"] == 1
        assert row["optim/grad_norm"] > 0
    assert seen["label"] == str(STEPS)
    assert seen["counts"]["route_rows"] == 0, "those of the server are not needed"


@pytest.mark.runs.with_args(filtered)
def test_what_a_filter_drops_is_sampled_anew(runs):
    run, seen = runs[filtered]
    rows, prompts = steps_of(run), prompts_of(run)
    assert sum(row["rollout/groups_dropped"] for row in rows) > 0
    for row in rows:
        sampled = PROMPTS + row["rollout/groups_dropped"]
        assert len(prompts[row["step"]]) == sampled
        assert row["engine/completions"] == 2 * sampled
        assert row["optim/grad_norm"] > 0
    assert seen["counts"]["/generate"] == sum(row["engine/completions"] for row in rows)


@pytest.mark.runs.with_args(resuming)
def test_sampling_ahead_with_answers_that_go_on_over_updates(runs):
    run, seen = runs[resuming]
    rows = steps_of(run, 5)
    assert rows[0]["rollout/staleness_max"] == 0
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert all(0 <= row["rollout/staleness_mean"] <= row["rollout/staleness_max"] <= 1 for row in rows)
    assert all(row["rollout/groups_dropped"] == 0 for row in rows)
    trained_on = [prompt for step in prompts_of(run).values() for prompt in step]
    assert len(trained_on) == len(set(trained_on)) == 5 * PROMPTS
    assert sum(row["engine/completions"] for row in rows) == 5 * SAMPLES
    assert seen["label"] == "5"
