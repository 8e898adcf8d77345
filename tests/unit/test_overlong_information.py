"""Overlong filtering knows why each answer ended, or says which option lacks which field (NeMo-RL #2163)."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

import moerl
from moerl.__main__ import main
from moerl.algorithms.filtering import build_filters
from moerl.credit import CreditRules, credit
from moerl.envs.single_turn import SingleTurn, SingleTurnConfig
from moerl.errors import ConfigError
from moerl.rollout.collect import Collector
from moerl.rollout.engines.dataset_engine import DatasetEngine, DatasetEngineConfig
from moerl.types import Completion, Prompt, SamplingParams

OVERLONG = [{"name": "overlong"}]
LACKS = r"algorithm\.filters has overlong, which reads every trajectory's finish_reason, but one has None"


class SilentEngine:
    """Answers without saying why it stopped."""

    async def generate(self, token_ids, params, request_id):
        tokens = np.array([7, 8], dtype=np.int32)
        return Completion(tokens, np.zeros(2, dtype=np.float32), None, policy_version=0)  # pyright: ignore[reportArgumentType]  the fault


class Accept:
    async def score(self, prompt, trajectory):
        return replace(trajectory, reward=1.0, reward_components={"right": 1.0})

    def check_prompts(self, prompts):
        return []

    def close(self):
        pass


def collected(engine, *prompt_ids):
    environment = SingleTurn(SingleTurnConfig(), decode=lambda ids: "", max_context_tokens=16)
    collector = Collector(
        engine=engine, environments={"single_turn": environment}, scorer=Accept(), run_seed=0, timeout_seconds=5.0
    )
    prompts = [Prompt(name, np.array([1, 2], dtype=np.int32), "1", "set") for name in prompt_ids]
    try:
        return collector.collect(prompts, step=1, group_size=1, params=SamplingParams(max_new_tokens=3))
    finally:
        collector.close()


def credited(groups):
    filters = build_filters(OVERLONG)
    rules = CreditRules(
        advantages=lambda x: (torch.ones(len(x.lengths), dtype=torch.float64), {}),
        shaping=lambda groups: (np.zeros(sum(len(g.trajectories) for g in groups)), {}),
        keeps=filters.sample,
        counts=filters.counts,
        reward_weights={"right": 1.0},
    )
    return credit(groups, rules)[0]


def test_an_engine_that_gives_no_finish_reason_stops_the_first_batch():
    groups = collected(SilentEngine(), "set/0")
    assert groups[0].trajectories[0].status == "ok"
    with pytest.raises(ConfigError, match=LACKS):
        credited(groups)
    excluding = build_filters([{"name": "overlong", "exclude_from_stats": True}, {"name": "zero_variance"}])
    with pytest.raises(ConfigError, match=LACKS):
        excluding.group(groups[0])


def test_completions_of_a_file_say_whether_they_were_cut():
    completions = {"set/0": np.array([5, 6, 1], dtype=np.int32), "set/1": np.array([5, 6, 7, 1], dtype=np.int32)}
    whole, cut = credited(collected(DatasetEngine(DatasetEngineConfig(), completions=completions), *completions))
    assert whole.loss_mask.tolist() == [False, False, True, True, True]
    assert not cut.loss_mask.any()


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"filters": OVERLONG}, r"algorithm\.filters asks for overlong, .* no finish_reason"),
        ({"overrides": ["filters=[{name: overlong}]"]}, r"algorithm\.filters asks for overlong"),
        (
            {"overrides": ["algorithm.shaping=[{name: overlong, max_tokens: 8}]"]},
            r"algorithm\.shaping asks for overlong",
        ),
    ],
    ids=["axis", "override", "shaping"],
)
def test_tensors_without_finish_reasons_refuse_what_reads_them(axes, named):
    with pytest.raises(ConfigError, match=named):
        moerl.objective("grpo", **axes)
    assert moerl.objective("dapo", filters=[], shaping=[]).section.filters == []


@pytest.fixture
def batch(tmp_path):
    rows = [{"logprobs": [-0.1, -0.2], "reward": 1.0, "group": 0}, {"logprobs": [-0.4], "reward": 0.0, "group": 0}]
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({"sequences": rows}))
    return str(path)


def test_the_command_refuses_the_option_and_tells_what_a_preset_leaves_out(batch, capsys, caplog):
    assert main(["objective", "--preset", "gspo", "--batch", batch, "filters=[{name: overlong}]"]) == 2
    assert "algorithm.filters asks for overlong" in capsys.readouterr().err
    with caplog.at_level(logging.WARNING):
        assert main(["objective", "--preset", "dapo", "--batch", batch, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 3
    assert "dapo: its filters (overlong, zero_variance) can only act where answers are sampled, not here" in caplog.text
    assert "dapo: its shaping (overlong) can only act where answers" in caplog.text
