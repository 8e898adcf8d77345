"""Evaluator: what counts as right, what is averaged over what, and pass@k against counting every draw."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from moerl.evaluate import EVALUATION_STEP, EvaluationSet, Evaluator, is_right, pass_at_k
from moerl.metrics import to_floats
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

GREEDY, SAMPLED = SamplingParams(8, temperature=0.0), SamplingParams(8, temperature=0.7)


def answer(reward, *, length=2, finish="stop", status="ok"):
    """One prompt token and `length` sampled ones; None is an answer without a verdict."""
    mask = np.array([False] + [True] * length)
    return Trajectory(
        token_ids=np.ones(1 + length, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.zeros(1 + length, dtype=np.float32),
        temperature=1.0,
        finish_reason=finish,
        version_spans=((1, 1 + length, 0),),
        status=status,
        reward_components={} if reward is None else {"task": reward},
        reward=float("nan") if reward is None else reward,
    )


FAILED = answer(None, length=5, finish="length", status="error")


def prompts(*names):
    return [Prompt(name, np.array([1], dtype=np.int32), "1", name.split("/")[0]) for name in names]


class Answers:
    """A collector with ready answers: greedy ones and sampled ones by prompt id. Remembers what it was asked."""

    def __init__(self, greedy, sampled):
        self.ready = {0.0: greedy, SAMPLED.temperature: sampled}
        self.asked = []

    def collect(self, prompts, *, step, group_size, params):
        self.asked.append(([prompt.prompt_id for prompt in prompts], step, group_size, params))
        ready = self.ready[params.temperature]
        assert all(len(ready[prompt.prompt_id]) == group_size for prompt in prompts)
        return [RolloutGroup(prompt, tuple(ready[prompt.prompt_id])) for prompt in prompts]


def evaluate(answers, *sets, num_samples, pass_at=()):
    held_out = [EvaluationSet(names[0].split("/")[0], prompts(*names)) for names in sets]
    return to_floats(Evaluator(held_out, answers.collect, GREEDY, SAMPLED, num_samples, pass_at).run())


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_answer(num_samples):
    for num_right in range(num_samples + 1):
        verdicts = [True] * num_right + [False] * (num_samples - num_right)
        for k in range(1, num_samples + 1):
            draws = list(itertools.combinations(verdicts, k))
            expected = sum(map(any, draws)) / len(draws)
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_stays_exact_where_binomials_are_huge():
    assert pass_at_k(4000, 1, 2000) == pytest.approx(0.5, abs=1e-12)
    assert pass_at_k(4000, 0, 4000) == 0.0
    assert pass_at_k(4000, 3999, 2) == 1.0


@pytest.mark.parametrize(("reward", "right"), [(1.0, True), (0.5, True), (0.4999, False), (0.0, False), (-1.0, False)])
def test_right_from_one_half_on(reward, right):
    assert is_right(answer(reward)) is right


def test_the_first_reward_decides_and_none_is_wrong():
    trajectory = answer(0.0)
    assert not is_right(answer(None))
    for components, right in (({"task": 1.0, "format": 0.0}, True), ({"format": 0.0, "task": 1.0}, False)):
        trajectory = dataclasses.replace(trajectory, reward_components=components)
        assert is_right(trajectory) is right


def test_accuracy_length_and_truncation_of_both_kinds_of_answers():
    answers = Answers(
        greedy={"a/0": [answer(1.0, length=4)], "a/1": [answer(0.0, length=2, finish="length")]},
        sampled={"a/0": [answer(1.0, length=1), answer(0.0, length=2)], "a/1": [answer(0.0, length=3)] * 2},
    )
    values = evaluate(answers, ["a/0", "a/1"], num_samples=2, pass_at=(1, 2))
    assert values == {
        "eval/accuracy_greedy": 0.5,
        "eval/response_length_greedy": 3.0,
        "eval/truncated_fraction_greedy": 0.5,
        "eval/errors_greedy": 0.0,
        "eval/accuracy_sampled": 0.25,
        "eval/response_length_sampled": 2.25,
        "eval/truncated_fraction_sampled": 0.0,
        "eval/errors_sampled": 0.0,
        "eval/pass@1": 0.25,
        "eval/pass@2": 0.5,
    }


def test_an_answer_without_a_verdict_is_counted_and_is_neither_right_nor_wrong():
    answers = Answers(
        greedy={"a/0": [answer(1.0)], "a/1": [FAILED], "a/2": [answer(0.0)]},
        sampled={
            "a/0": [answer(1.0), answer(0.0), FAILED],
            "a/1": [FAILED, FAILED, answer(1.0)],  # too few are left for pass@2
            "a/2": [FAILED, FAILED, FAILED],
        },
    )
    values = evaluate(answers, ["a/0", "a/1", "a/2"], num_samples=3, pass_at=(1, 2))
    assert values["eval/accuracy_greedy"] == 0.5
    assert values["eval/errors_greedy"] == 1.0
    assert values["eval/response_length_greedy"] == 2.0
    assert values["eval/truncated_fraction_greedy"] == 0.0
    assert values["eval/accuracy_sampled"] == pytest.approx(2 / 3)
    assert values["eval/errors_sampled"] == 6.0
    assert values["eval/pass@1"] == pytest.approx((0.5 + 1.0) / 2)
    assert values["eval/pass@2"] == 1.0


def test_when_everything_failed_there_is_no_accuracy_rather_than_zero():
    values = evaluate(Answers({"a/0": [FAILED]}, {"a/0": [FAILED] * 2}), ["a/0"], num_samples=2, pass_at=(1,))
    assert values == {"eval/errors_greedy": 1.0, "eval/errors_sampled": 2.0}


def test_over_sets_every_prompt_weighs_the_same_and_each_set_has_its_own_numbers():
    names = [["a/0"], ["b/0", "b/1", "b/2"]]
    rewards = {"a/0": 1.0, "b/0": 0.0, "b/1": 0.0, "b/2": 1.0}
    answers = Answers({name: [answer(r)] for name, r in rewards.items()}, {n: [answer(r)] for n, r in rewards.items()})
    values = evaluate(answers, *names, num_samples=1, pass_at=(1,))
    for name in ("accuracy_greedy", "accuracy_sampled", "pass@1"):
        assert values[f"eval/{name}"] == 0.5  # not (1 + 1/3) / 2
        assert values[f"eval/a/{name}"] == 1.0
        assert values[f"eval/b/{name}"] == pytest.approx(1 / 3)


def test_one_set_has_no_numbers_of_its_own_name():
    values = evaluate(Answers({"a/0": [answer(1.0)]}, {}), ["a/0"], num_samples=0)
    assert not [name for name in values if name.startswith("eval/a/")]


def test_two_evaluations_ask_the_engine_for_the_very_same():
    answers = Answers({"a/0": [answer(1.0)]}, {"a/0": [answer(1.0)] * 4})
    evaluate(answers, ["a/0"], num_samples=4, pass_at=(1,))
    evaluate(answers, ["a/0"], num_samples=4, pass_at=(1,))
    once = [(["a/0"], EVALUATION_STEP, 1, GREEDY), (["a/0"], EVALUATION_STEP, 4, SAMPLED)]
    assert answers.asked == once * 2


def test_without_samples_only_greedy_answers_are_asked_for():
    answers = Answers({"a/0": [answer(1.0)]}, {})
    values = evaluate(answers, ["a/0"], num_samples=0, pass_at=(1,))
    assert len(answers.asked) == 1
    assert set(values) == {f"eval/{n}_greedy" for n in ("accuracy", "response_length", "truncated_fraction", "errors")}
