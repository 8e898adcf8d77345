"""DCPO's advantages over visits, and their memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.advantage.history import HISTORY, PromptHistory
from moerl.algorithms.advantage.transform.sas import smoothed
from moerl.algorithms.types import CreditInputs
from moerl.config.schema import AdvantageSection
from moerl.errors import CheckpointError, ConfigError

SAS = AdvantageSection(center="history", scale="group_std", transform={"name": "sas"}, eps=0.0)


def visit(history, rewards, prompt="p", cfg=SAS, extra=()):
    rows = [*rewards, *(reward for _, more in extra for reward in more)]
    prompts = [prompt] * len(rewards) + [name for name, more in extra for _ in more]
    inputs = CreditInputs(
        rewards=torch.tensor(rows, dtype=torch.float64).unsqueeze(1),
        reward_weights=torch.ones(1, dtype=torch.float64),
        group_ids=torch.tensor([["p", "q"].index(name) for name in prompts]),
        lengths=torch.ones(len(rows), dtype=torch.int64),
        prompt_ids=tuple(prompts),
        shaping=torch.zeros(len(rows), dtype=torch.float64),
        state={HISTORY: history},
    )
    return group_advantages(cfg, inputs)[0]


VISITS = [
    ((1, 0, 0, 1), (1.0, -1.0, -1.0, 1.0)),
    ((1, 1, 1, 1), (0.288675,) * 4),
    ((1, 0, 1, 1), (0.577350, -1.732051, 0.577350, 0.577350)),
]


def test_vectors_of_three_visits():
    history = PromptHistory()
    for rewards, wanted in VISITS:
        torch.testing.assert_close(
            visit(history, rewards), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-6
        )
    second = PromptHistory()
    for rewards, _ in VISITS[:2]:
        visit(second, rewards)
    assert second.prompts["p"].mean == pytest.approx(0.75)
    assert second.prompts["p"].std(0) == pytest.approx(0.433013, abs=1e-6)


def test_pooled_statistics_are_those_of_all_rewards_whatever_the_sizes():
    rng = np.random.default_rng(0)
    history, seen = PromptHistory(), []
    for size in (3, 1, 7, 2):
        rewards = rng.normal(size=size).tolist()
        seen += rewards
        pooled = history.visit("p", rewards)
    assert pooled.visits == 4
    assert pooled.mean == pytest.approx(np.mean(seen))
    assert pooled.std(0) == pytest.approx(np.std(seen))
    assert pooled.std(1) == pytest.approx(np.std(seen, ddof=1))


def test_the_smaller_of_both_is_taken_and_a_tie_is_the_total():
    new, total = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 3.0, -2.0])
    assert smoothed(new, total, 1).tolist() == [1.0, 1.0, 2.0]
    assert smoothed(new, total, 2).tolist() == [2.0, 2.0, 0.0]
    assert smoothed(torch.tensor([1.0]), torch.tensor([-1.0]), 1).tolist() == [1.0]
    assert smoothed(torch.tensor([3.0]), torch.tensor([0.0]), 3).tolist() == [1.0]  # 2 by this visit, 1 by all of them


def test_prompts_have_memories_of_their_own():
    history = PromptHistory()
    visit(history, (1, 0, 0, 1), extra=[("q", (1, 1))])
    alone = visit(PromptHistory(), (1, 1, 1, 1))
    assert (alone == 0).all()
    both = visit(history, (1, 1, 1, 1), extra=[("q", (1, 1))])
    assert (both[:4] > 0.28).all()
    assert (both[4:] == 0).all()


def test_unscored_answers_leave_no_trace():
    history = PromptHistory()
    values = visit(history, (1.0, float("nan"), 0.0))
    assert values[1] == 0
    assert history.prompts["p"].count == 2
    visit(history, (float("nan"),) * 2)
    assert history.prompts["p"].visits == 1


def test_memory_goes_through_a_checkpoint():
    history = PromptHistory()
    for rewards, _ in VISITS[:2]:
        visit(history, rewards)
    again = PromptHistory()
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert again == history
    wanted = torch.tensor(VISITS[2][1], dtype=torch.float64)
    torch.testing.assert_close(visit(again, VISITS[2][0]), wanted, rtol=0, atol=1e-6)
    with pytest.raises(CheckpointError, match="damaged"):
        again.load_state_dict({"p": [1, 2]})


def test_without_a_memory_it_says_what_to_pass():
    with pytest.raises(ConfigError, match="PromptHistory"):
        visit(None, (1, 0))
