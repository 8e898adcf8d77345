"""Answers that are sampled anew: only the chosen ones, with fresh seeds, and no longer than the rounds."""

from __future__ import annotations

import numpy as np
import pytest

from moerl.algorithms.duplicates import copies
from moerl.metrics import to_floats
from moerl.rollout.resample import FIRST_INDEX, ResamplingCollector
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

PARAMS = SamplingParams(max_new_tokens=4)


def prompt(name):
    return Prompt(name, np.array([1], dtype=np.int32), None, "d")


class Scripted:
    """The answer to a prompt at a sample index is a token that `answer` tells."""

    def __init__(self, answer, status="ok"):
        self.answer = answer
        self.status = status
        self.asked = []

    def collect(self, prompts, *, step, group_size, params, first_indices):
        pairs = list(zip(prompts, first_indices, strict=True))
        self.asked += [(p.prompt_id, start + i) for p, start in pairs for i in range(group_size)]
        return [RolloutGroup(p, tuple(self._play(p, start + i) for i in range(group_size))) for p, start in pairs]

    def _play(self, p, index):
        return Trajectory(
            token_ids=np.array([1, self.answer(p.prompt_id, index), 9], dtype=np.int32),
            loss_mask=np.array([False, True, True]),
            rollout_logprobs=np.zeros(3, dtype=np.float32),
            temperature=1.0,
            finish_reason="stop",
            version_spans=((1, 3, 0),),
            status=self.status,
            reward=float("nan") if self.status == "error" else 0.0,
        )


def answers(groups):
    return [[int(t.token_ids[1]) for t in group.trajectories] for group in groups]


def test_copies_are_replaced_and_others_stay():
    inner = Scripted(lambda name, index: 5 if index < FIRST_INDEX else 100 + index - FIRST_INDEX)
    collector = ResamplingCollector(inner, copies, 3)
    groups = collector.collect([prompt("a")], step=1, group_size=3, params=PARAMS)
    assert answers(groups) == [[5, 100, 101]]
    assert len(inner.asked) == 5
    assert to_floats(collector.take()) == {"rollout/resampled": 2.0}
    assert to_floats(collector.take()) == {"rollout/resampled": 0.0}


def test_failed_episodes_are_no_copies_of_one_another():
    """They would be drawn anew, and an engine or a judge that fails would not be seen."""
    inner = Scripted(lambda name, index: 5, status="error")
    groups = ResamplingCollector(inner, copies, 3).collect([prompt("a")], step=1, group_size=3, params=PARAMS)
    assert len(inner.asked) == 3
    assert all(t.status == "error" for t in groups[0].trajectories)


def test_what_is_still_a_copy_after_the_rounds_stays():
    inner = Scripted(lambda name, index: 5)
    groups = ResamplingCollector(inner, copies, 2).collect([prompt("a")], step=1, group_size=3, params=PARAMS)
    assert answers(groups) == [[5, 5, 5]]
    assert len(inner.asked) == 3 + 2 * 2


def test_nothing_is_drawn_without_copies():
    inner = Scripted(lambda name, index: index)
    groups = ResamplingCollector(inner, copies, 2).collect(
        [prompt("a"), prompt("b")], step=1, group_size=2, params=PARAMS
    )
    assert answers(groups) == [[0, 1], [0, 1]]
    assert len(inner.asked) == 4


@pytest.mark.parametrize("rounds", [1, 4])
def test_no_seed_is_used_twice_even_when_a_prompt_comes_again(rounds):
    inner = Scripted(lambda name, index: 5)
    prompts = [prompt("a"), prompt("a"), prompt("b")]
    ResamplingCollector(inner, copies, rounds).collect(
        prompts, step=1, group_size=3, params=PARAMS, first_indices=[0, 3, 0]
    )
    assert len(set(inner.asked)) == len(inner.asked)
