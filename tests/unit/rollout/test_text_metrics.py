"""Metrics of a step's answers: closed forms, and nothing that the policy did not choose matters."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config.records import REFLECTION_WORDS
from moerl.metrics import to_floats
from moerl.rollout.described import GroupDescriber
from moerl.rollout.text_metrics import TextSettings, count_words, distinct_ngrams, sampled_runs, text_metrics
from moerl.types import Prompt, RolloutGroup, Trajectory

PROMPT = Prompt("d/0", np.array([1], dtype=np.int32), "1", "d")
SETTINGS = TextSettings(ngrams=(1, 2), reflection_words=("wait", "check again"))


def answer(tokens, *, reward=0.0, right=None, text="", logprobs=None, finish="length", status="ok"):
    """Two prompt tokens with garbage beside them, then `tokens`."""
    right = reward if right is None else right
    values = np.log(np.full(len(tokens), 0.5)) if logprobs is None else logprobs
    return Trajectory(
        token_ids=np.array([99, 98, *tokens], dtype=np.int32),
        loss_mask=np.array([False, False] + [True] * len(tokens)),
        rollout_logprobs=np.array([np.nan, np.inf, *values], dtype=np.float32),
        temperature=1.0,
        finish_reason=finish,
        version_spans=(),
        response_text=text,
        status=status,
        reward_components={"task": right},
        reward=reward if status == "ok" else math.nan,
    )


def group(*answers):
    return RolloutGroup(PROMPT, answers)


def metrics(*groups, settings=SETTINGS):
    return to_floats(text_metrics(groups, settings))


def test_distinct_ngrams_of_a_group_are_by_ngrams_and_answers_have_borders():
    found = metrics(group(answer([1, 2, 1]), answer([2, 1])))
    assert found["rollout/distinct_1"] == 2 / 5
    assert found["rollout/distinct_2"] == 2 / 3  # 12, 21 and 21 again; 1|2 over the border is none


def test_answers_without_an_ngram_count_for_no_mean():
    found = metrics(group(answer([1])), group(answer([1, 1, 1])))
    assert found["rollout/distinct_1"] == (1 + 1 / 3) / 2
    assert found["rollout/distinct_2"] == 0.5
    assert "rollout/distinct_2" not in metrics(group(answer([1])))


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4), st.sets(st.integers(1, 5)))
def test_ngrams_are_those_that_a_set_of_tuples_has(runs, sizes):
    found = distinct_ngrams([np.array(run, dtype=np.int32) for run in runs], sizes)
    for n in sizes:
        every = [tuple(run[i : i + n]) for run in runs for i in range(len(run) - n + 1)]
        assert found[n] == (len(set(every)), len(every))


def test_an_ngram_does_not_span_what_the_policy_did_not_choose():
    one = answer([1, 2, 3, 4])
    mask = one.loss_mask.copy()
    mask[4] = False
    assert [run.tolist() for run in sampled_runs(replace(one, loss_mask=mask))] == [[1, 2], [4]]
    assert sampled_runs(replace(one, loss_mask=np.zeros_like(mask))) == []


def test_distinct_answers_of_a_group():
    found = metrics(group(answer([1, 2]), answer([1, 2]), answer([2]), answer([3])), group(answer([1])))
    assert found["rollout/distinct_fraction"] == (3 / 4 + 1) / 2


def test_spread_of_the_reward_within_groups():
    spread = [answer([1], reward=r) for r in (0.0, 0.0, 2.0, 2.0)]
    found = metrics(group(*spread), group(answer([1], reward=5.0), answer([1], reward=5.0)), group(answer([1])))
    assert found["reward/group_std"] == (1.0 + 0.0) / 2
    assert found["reward/group_range"] == (2.0 + 0.0) / 2
    failed = answer([1], status="error")
    assert "reward/group_std" not in metrics(group(answer([1], reward=1.0), failed))


def test_probability_of_the_chosen_tokens_is_a_mean_over_tokens():
    found = metrics(group(answer([1, 1, 1], logprobs=np.log([0.5, 0.5, 0.5]))), group(answer([1], logprobs=[0.0])))
    assert found["rollout/token_prob"] == pytest.approx((3 * 0.5 + 1) / 4, abs=1e-7)
    assert found["rollout/token_logprob"] == pytest.approx(3 * math.log(0.5) / 4, abs=1e-7)


def test_length_of_right_and_wrong_answers_apart():
    right = [answer([1] * n, reward=1.0) for n in (2, 4)]
    wrong = [answer([1] * 7, reward=0.2, right=0.0), answer([1] * 50, status="error")]
    found = metrics(group(*right, *wrong))
    assert (found["rollout/response_length_right"], found["rollout/response_length_wrong"]) == (3.0, 7.0)
    assert "rollout/response_length_wrong" not in metrics(group(*right))


def test_reflection_words():
    texts = ["Wait, wait. Let me check\n again.", "I await the waiter", "no"]
    found = metrics(group(*(answer([1], text=text) for text in texts)))
    assert found["rollout/reflection_words"] == (3 + 1 + 0) / 3
    assert found["rollout/reflection_fraction"] == 2 / 3
    assert "rollout/reflection_words" not in metrics(group(answer([1])), settings=TextSettings())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Rechecking: RETHINK it", 2),
        ("Let me re-evaluate and then reevaluate.", 2),
        ("We go over  the\tsteps", 1),
        ("precheck", 0),
        ("", 0),
    ],
)
def test_the_published_word_list(text, count):
    assert count_words(text, REFLECTION_WORDS) == count


def test_words_of_other_scripts_and_signs_need_no_border():
    assert count_words("我们重新检查", ("重新",)) == 1
    assert count_words("a.*b a.xb", (".*",)) == 1
    assert count_words("anything", ()) == 0


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_neither_order_nor_masked_tokens_matter(seed):
    random = np.random.default_rng(seed)
    groups = [
        group(*(answer(random.integers(0, 3, random.integers(0, 6)), reward=float(random.integers(2)), text="wait")
                for _ in range(3)))
        for _ in range(3)
    ]  # fmt: skip
    expected = metrics(*groups)

    def with_garbage(one):
        tokens, logprobs = one.token_ids.copy(), one.rollout_logprobs.copy()
        tokens[~one.loss_mask] = random.integers(0, 3, 2)
        logprobs[~one.loss_mask] = random.normal(size=2)
        return replace(one, token_ids=tokens, rollout_logprobs=logprobs)

    shuffled = [
        group(*(with_garbage(g.trajectories[i]) for i in random.permutation(3)))
        for g in (groups[i] for i in random.permutation(3))
    ]
    assert metrics(*shuffled) == pytest.approx(expected, rel=1e-12)


def test_a_step_without_answers_has_no_metrics():
    assert metrics() == {}
    assert metrics(group(answer([], status="error"))) == {}


class Buffer:
    """Shows two groups a step to its filter."""

    def __init__(self, look):
        self.look = look

    def take(self, step, version):
        groups = [group(answer([step])), group(answer([step]), answer([step]))]
        return [one for one in groups if self.look(one) is None], {}

    def state_dict(self):
        return {"at": 3}

    def load_state_dict(self, state):
        assert state == {"at": 3}


def test_dropped_groups_are_described_too_and_every_step_anew():
    describer = GroupDescriber(lambda groups: text_metrics(groups, TextSettings()))
    rollouts = describer.rollouts(
        Buffer(describer.group_filter(lambda one: "small" if len(one.trajectories) < 2 else None))
    )
    for step in (1, 2):
        groups, found = rollouts.take(step, 0)
        assert len(groups) == 1
        assert to_floats(found)["rollout/distinct_fraction"] == (1 + 1 / 2) / 2
    rollouts.load_state_dict(rollouts.state_dict())
