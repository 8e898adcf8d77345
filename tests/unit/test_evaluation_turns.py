"""Episodes take turns in front of the engine, so that no deadline runs while one waits to be served."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

import numpy as np
import pytest

from moerl.build_rollout import build_evaluator, build_rollout_side, load_data
from moerl.configure import load
from moerl.metrics import to_floats
from moerl.rollout.engines.local_engine import LocalEngine
from moerl.rollout.engines.sglang_engine import SglangEngine
from moerl.types import Completion

NUM_PROMPTS = 12
SMALL = (
    f"evaluation.sets.0.limit={NUM_PROMPTS}",
    "evaluation.num_samples=2",
    "reward.rewards=[{name: regex_match, pattern: '(-?[0-9])'}]",
)
SERVERS = {"name": "sglang", "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"], "requests_per_server": 2}
ENGINES = {
    "local": (LocalEngine, {"name": "local", "max_batch_size": 3}, 3),
    "sglang": (SglangEngine, SERVERS, 4),
}


class Served:
    """Stands for an engine's `generate`: it answers some turns of the loop later, and counts who is there."""

    def __init__(self) -> None:
        self.now = self.most = self.calls = 0

    async def generate(self, token_ids, params, request_id):
        self.now += 1
        self.calls += 1
        self.most = max(self.most, self.now)
        for _ in range(20):
            await asyncio.sleep(0)
        self.now -= 1
        return Completion(np.array([1], dtype=np.int32), np.zeros(1, dtype=np.float32), "stop", policy_version=0)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", ENGINES)
def test_no_more_held_out_episodes_begin_than_the_engine_serves_at_once(name, staleness, tmp_path, monkeypatch):
    engine, node, at_once = ENGINES[name]
    served = Served()
    monkeypatch.setattr(engine, "generate", lambda _, *given: served.generate(*given))
    place = (f"rollout.engine={json.dumps(node)}", f"run.output_dir={tmp_path}", "weight_sync.transport=disk")
    if name == "local":
        place = place[:2]
    cfg = load("configs/demo/gspo.yaml", [*SMALL, *place, f"rollout.max_staleness={staleness}"])
    with closing(load_data(cfg)) as data, closing(build_rollout_side(cfg, data)) as side:
        values = to_floats(build_evaluator(cfg, data, side).run())
        assert served.calls == 3 * NUM_PROMPTS
        assert values["eval/errors_greedy"] == values["eval/errors_sampled"] == 0
        assert served.most == at_once


TOOLS = (
    "rollout.environment={name: tool_use, tools: [{name: calculator}], call_open: '\\boxed{', call_close: '}', "
    "body: argument, results: text, result_close: ';', error_text: '?', max_turns: 3, scored: all}",
)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("environment", "times"), [((), 1), (TOOLS, 2)], ids=["once", "tools"])
def test_training_episodes_take_turns_too(environment, times, name, staleness, tmp_path, monkeypatch):
    """Before, all of a step began at once, and those that waited in the engine for a wave or two came late. An episode
    that calls tools keeps its place while they run; so on policy twice as many of those are let in.
    """
    engine, node, at_once = ENGINES[name]
    served = Served()
    monkeypatch.setattr(engine, "generate", lambda _, *given: served.generate(*given))
    place = (f"rollout.engine={json.dumps(node)}", f"run.output_dir={tmp_path}", "weight_sync.transport=disk")
    if name == "local":
        place = place[:2]
    overrides = [*SMALL, *place, *environment, f"rollout.max_staleness={staleness}"]
    cfg = load("configs/demo/grpo_r3.yaml", [*overrides, "algorithm.routing=none"])
    with closing(load_data(cfg)) as data, closing(build_rollout_side(cfg, data)) as side:
        prompts = data.train[0].prompts[:NUM_PROMPTS]
        groups = side.collector.collect(prompts, step=1, group_size=2, params=side.sampling)
        assert {trajectory.status for group in groups for trajectory in group.trajectories} == {"ok"}
        assert served.calls == 2 * NUM_PROMPTS
        assert served.most == at_once * (1 if staleness else times)


def test_ahead_of_training_episodes_of_both_kinds_take_turns_together(tmp_path, monkeypatch):
    served = Served()
    monkeypatch.setattr(LocalEngine, "generate", lambda _, *given: served.generate(*given))
    engine = f"rollout.engine={json.dumps(ENGINES['local'][1])}"
    cfg = load("configs/demo/gspo.yaml", [*SMALL, engine, f"run.output_dir={tmp_path}", "rollout.max_staleness=1"])
    with closing(load_data(cfg)) as data, closing(build_rollout_side(cfg, data)) as side:
        prompts = data.train[0].prompts[:NUM_PROMPTS]

        async def train_meanwhile():
            plays = [side.collector.play(prompt, 0, step=1, params=side.sampling) for prompt in prompts]
            tasks = [asyncio.create_task(play) for play in plays]
            await asyncio.sleep(0)
            return tasks

        tasks = side.collector.run(train_meanwhile())
        build_evaluator(cfg, data, side).run()

        async def finish():
            return await asyncio.gather(*tasks)

        assert {trajectory.status for trajectory in side.collector.run(finish())} == {"ok"}
        assert served.calls == 4 * NUM_PROMPTS
        assert served.most == 3
