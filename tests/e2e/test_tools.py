"""Episodes with a tool in whole runs, with replayed routes: the step-0 contract and R3 hold over turns.

The demo's policy was never taught to call. So its box counts as the call: `\\boxed{15}` asks the calculator for
`15`, whose answer follows in the same turn, and the policy goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.build import build_run
from moerl.configure import load
from moerl.errors import ConfigError
from moerl.loop import train

SMALL = (
    "run.num_steps=2",
    "rollout.prompts_per_step=4",
    "batch.num_minibatches=1",
    "evaluation.sets.0.limit=4",
    "evaluation.interval_steps=2",
    "telemetry.report=false",
    "telemetry.progress=off",
    "telemetry.probe_prompts=0",
)
BOX = (
    "rollout.environment={name: tool_use, tools: [{name: calculator}], call_open: '\\boxed{', call_close: '}', "
    "body: argument, results: text, result_close: ';', error_text: '?', max_turns: 3, scored: all}"
)


def run(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], Any]:
    """Metrics by step, and the groups of the last step."""
    cfg = load("configs/demo/grpo_r3.yaml", [*SMALL, BOX, *overrides, f"run.output_dir={folder}", "run.name=tools"])
    made = build_run(cfg)
    assert made is not None
    groups = []
    take = made.rooms.rollouts.take

    def seen(step: int, version: int) -> Any:
        taken, metrics = take(step, version)
        groups[:] = taken
        return taken, metrics

    made.rooms.rollouts.take = seen
    try:
        train(made.rooms, made.schedule, made.resume_from)
    finally:
        made.close()
    return [json.loads(line) for line in (folder / "tools" / "metrics.jsonl").read_text().splitlines()], groups


def test_two_steps_with_turns_and_replayed_routes(tmp_path: Path) -> None:
    rows, groups = run(tmp_path)
    assert [row["contract/holds"] for row in rows if "contract/holds" in row] == [1.0]
    for row in rows[1:]:
        assert row["rollout/tool_turns"] > 1.5
        assert row["rollout/tool_calls"] > 0.5
        assert row["rollout/tool_result_tokens"] > 0
        assert row["rollout/errors"] == 0
        assert row["route/replay_coverage"] == 1.0
        assert row["mm/logp_abs_mean"] < 1e-5
        assert row["optim/grad_norm"] > 0
    trajectories = [one for group in groups for one in group.trajectories]
    assert len(trajectories) == 32
    several = [one for one in trajectories if one.metrics["tool_turns"] > 1]
    assert several
    for one in several:
        added = len(one.token_ids) - one.response_length
        assert added > 0
        assert not one.rollout_logprobs[~one.loss_mask].any()
        assert (one.rollout_logprobs[one.loss_mask] < 0).any()
        assert one.has_route.tolist() == [True] * (len(one.token_ids) - 1) + [False]
        assert sum(end - start for start, end, _ in one.version_spans) == one.response_length
        assert np.flatnonzero(np.diff(one.loss_mask.astype(int)) == -1).size >= 1


def test_a_file_of_completions_has_no_turns() -> None:
    with pytest.raises(ConfigError, match=r"tool_use asks several times, and .* has one completion"):
        load("configs/demo/sft.yaml", [BOX])


def test_markers_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    node = "rollout.environment={name: tool_use, tools: [{name: calculator}], results: text, error_text: '?'}"
    cfg = load("configs/demo/grpo.yaml", [*SMALL, node, f"run.output_dir={tmp_path}"])
    with pytest.raises(ConfigError, match="cannot write '<tool_call>', '</tool_call>'; choose markers"):
        build_run(cfg)
