"""Whole training runs of the demo's policy whose rollouts come from fake SGLang servers, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moerl.build import build_run
from moerl.configure import load
from moerl.loop import train
from moerl.rollout.engine import sample_seed
from moerl.rollout.fake_engine.model import FakeModel
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.types import RolloutGroup

SERVED = FakeEngineConfig(vocab_size=38, num_layers=2, num_experts=16, lengths="uniform:12,40", weight_version="0")
"""The shape of `configs/demo/policy`."""

SMALL = (
    "run.num_steps=3",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=24",
    "batch.num_minibatches=1",
    "reward.rewards=[{name: regex_match, pattern: '(-?[0-9])'}]",
    "weight_sync.transport=disk",
    "evaluation.sets=[]",
    "evaluation.interval_steps=0",
    "checkpoint.interval_steps=0",
    "checkpoint.export_hf=false",
    "telemetry.report=false",
    "telemetry.progress=off",
    "telemetry.probe_prompts=0",
)
"""A fake server's answers are random letters, so the reward is for a digit that some have by chance."""


def engine_of(urls: Sequence[str], **settings: Any) -> str:
    """The override for `rollout.engine`."""
    given = {"name": "sglang", "urls": list(urls), "retry_wait_seconds": 0.01, "health_seconds": 0.2, **settings}
    return f"rollout.engine={json.dumps(given)}"


Watcher = Callable[[int, Sequence[RolloutGroup] | None], None]
"""Told of (step, None) before a step's rollouts are taken, and of (step, groups) when they are there."""


def served(
    folder: Path, urls: Sequence[str], *overrides: str, watcher: Watcher | None = None, **settings: Any
) -> list[dict[str, Any]]:
    """Train, and return the rows of metrics.jsonl."""
    name = f"run.name={folder.name}"
    chosen = [*SMALL, engine_of(urls, **settings), f"run.output_dir={folder.parent}", name, *overrides]
    run = build_run(load("configs/demo/gspo.yaml", chosen))
    assert run is not None
    take = run.rooms.rollouts.take

    def told(step: int, version: int) -> Any:
        if watcher is not None:
            watcher(step, None)
        groups, metrics = take(step, version)
        if watcher is not None:
            watcher(step, groups)
        return groups, metrics

    run.rooms.rollouts.take = told
    try:
        train(run.rooms, run.schedule, run.resume_from)
    finally:
        run.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_sampled_by(groups: Sequence[RolloutGroup], step: int, version: int) -> None:
    """Every token and every row of routes is that of `version`, whichever server gave it, and none is missing."""
    model = FakeModel(SERVED)
    for group in groups:
        for index, one in enumerate(group.trajectories):
            prompt = len(group.prompt.token_ids)
            key = model.key(sample_seed(0, step, group.prompt.prompt_id, index), prompt)
            ids = model.tokens(str(version), key, prompt, one.response_length)[0]
            if one.finish_reason == "stop":
                ids[-1] = SERVED.eos_token_id
            np.testing.assert_array_equal(one.token_ids[prompt:], ids)
            assert one.response_length == min(24, model.answer_length(key, prompt))
            assert one.version_spans == ((prompt, len(one.token_ids), version),)
            assert one.routed_experts is not None
            routes = model.routes(str(version), one.token_ids[:-1], 0)
            np.testing.assert_array_equal(one.routed_experts.open()[:-1], routes)
