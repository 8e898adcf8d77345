"""Evaluator: what counts as right, what is averaged over what, and what is chosen from several answers."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from moerl.errors import RolloutError
from moerl.evaluate import EVALUATION_STEP, EvaluationSet, Evaluator, is_right
from moerl.metrics import to_floats
from moerl.types import Prompt, RolloutGroup, SamplingParams, Trajectory

GREEDY, SAMPLED = SamplingParams(8, temperature=0.0), SamplingParams(8, temperature=0.7)


def answer(reward, *, length=2, finish="stop", status="ok", text="7", logprob=0.0):
    """One prompt token, whose logprob is garbage, and `length` sampled ones; None is an answer without a verdict."""
    mask = np.array([False] + [True] * length)
    return Trajectory(
        token_ids=np.ones(1 + length, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.array([np.nan] + [logprob] * length, dtype=np.float32),
        temperature=1.0,
        finish_reason=finish,
        version_spans=((1, 1 + length, 0),),
        response_text=text,
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


def evaluate(answers, *sets, num_samples, pass_at=(), **options):
    options = {"max_error_fraction": 1.0, **options}
    held_out = [EvaluationSet(names[0].split("/")[0], prompts(*names)) for names in sets]
    return to_floats(Evaluator(held_out, answers.collect, GREEDY, SAMPLED, num_samples, pass_at, **options).run())


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
        greedy={"a/0": [answer(1.0, length=4)], "a/1": [answer(0.0, length=2, finish="length", text=" ")]},
        sampled={"a/0": [answer(1.0, length=1), answer(0.0, length=2)], "a/1": [answer(0.0, length=3)] * 2},
    )
    values = evaluate(answers, ["a/0", "a/1"], num_samples=2, pass_at=(1, 2))
    assert values == {
        "eval/accuracy_greedy": 0.5,
        "eval/response_length_greedy": 3.0,
        "eval/truncated_fraction_greedy": 0.5,
        "eval/format_fraction_greedy": 0.5,
        "eval/errors_greedy": 0.0,
        "eval/accuracy_sampled": 0.25,
        "eval/response_length_sampled": 2.25,
        "eval/truncated_fraction_sampled": 0.0,
        "eval/format_fraction_sampled": 1.0,
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
    answers = Answers({"a/0": [FAILED]}, {"a/0": [FAILED] * 2})
    values = evaluate(answers, ["a/0"], num_samples=2, pass_at=(1,))
    assert values == {"eval/errors_greedy": 1.0, "eval/errors_sampled": 2.0}


LATE = dataclasses.replace(FAILED, error="TimeoutError: no end within 600 s (rollout.timeout_seconds)")
OVERLONG = answer(None, status="too_long")


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_too_many_answers_without_a_verdict_end_the_evaluation(kind):
    """Of 30 the first 10 are right, the others late: 1.0 of those that came, 0.33 if the late ones are wrong."""
    names = [f"a/{i}" for i in range(30)]
    good = {name: [answer(1.0)] for name in names}
    late = {name: [answer(1.0) if i < 10 else LATE if i < 29 else OVERLONG] for i, name in enumerate(names)}
    answers = Answers(late, good) if kind == "greedy" else Answers(good, late)
    said = (
        rf"20 of 30 {kind} answers to a have no verdict \(19 TimeoutError, 1 too_long; first: TimeoutError: no end "
        r"within 600 s .*\), more than reward\.max_error_fraction=0\.1 allows; .* raise rollout\.timeout_seconds"
    )
    with pytest.raises(RolloutError, match=said):
        evaluate(answers, names, num_samples=1, max_error_fraction=0.1)


def test_a_few_answers_without_a_verdict_are_said_with_what_they_leave_open(caplog):
    names = [f"a/{i}" for i in range(30)]
    good = {name: [answer(float(i % 2))] for i, name in enumerate(names)}
    some = good | {name: [LATE] for name in names[:3]}
    with caplog.at_level(logging.WARNING):
        values = evaluate(Answers(some, good), names, num_samples=1, max_error_fraction=0.1)
    assert values["eval/errors_greedy"] == 3.0
    assert values["eval/accuracy_greedy"] == pytest.approx(14 / 27)
    (record,) = caplog.records
    assert "3 of 30 greedy answers to a have no verdict" in record.message
    assert f"{14 / 30:.3f}, had all been right {17 / 30:.3f}" in record.message


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
    names = ("accuracy", "response_length", "truncated_fraction", "format_fraction", "errors")
    assert set(values) == {f"eval/{name}_greedy" for name in names}


# Votes and the best of several


def boxed(prompt, text):
    """What stands after the colon, if there is one."""
    return text.partition(":")[2] or None


def test_a_majority_votes_on_the_normal_form_of_what_is_read():
    greedy = {"a/0": [answer(1.0)], "b/0": [answer(1.0)]}
    sampled = {
        "a/0": [answer(1.0, text=text) for text in ("is: 7", "so:7.0")] + [answer(0.0, text="or: 8")],
        "b/0": [answer(0.0, text="8")] * 2 + [answer(1.0, text="finally: 7")],  # the wrong ones lack a colon: no vote
    }
    values = evaluate(
        Answers(greedy, sampled), ["a/0"], ["b/0"], num_samples=3, pass_at=(3,), maj_at=(1, 2, 3), read=boxed
    )
    assert values["eval/a/maj@1"] == values["eval/a/accuracy_sampled"] == pytest.approx(2 / 3)
    assert values["eval/a/maj@2"] == pytest.approx(2 / 3)
    assert values["eval/a/maj@3"] == values["eval/b/maj@3"] == values["eval/maj@3"] == 1.0
    assert values["eval/b/maj@2"] == pytest.approx(2 / 3)
    assert values["eval/format_fraction_sampled"] == pytest.approx(4 / 6)
    assert values["eval/b/format_fraction_sampled"] == pytest.approx(1 / 3)


def test_the_best_of_k_by_reward_and_by_how_likely_it_was():
    """The right answer is likeliest per token; a wrong one is shorter, and likelier as a whole."""
    answers = [
        answer(1.0, length=4, logprob=-0.1),  # sum -0.4, mean -0.1
        answer(0.0, length=1, logprob=-0.3),  # sum -0.3
        answer(0.25, length=8, logprob=-0.2),  # sum -1.6
    ]
    values = evaluate(Answers({"a/0": answers[:1]}, {"a/0": answers}), ["a/0"], num_samples=3, best_of=(1, 2, 3))
    found = {name: [values[f"eval/{name}@{k}"] for k in (1, 2, 3)] for name in KINDS}
    assert found["best_by_reward"] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert found["max_reward"] == pytest.approx([1.25 / 3, 2.25 / 3, 1.0])
    assert found["best_by_logprob"] == pytest.approx([1 / 3, 1 / 3, 0.0])
    assert found["best_by_mean_logprob"] == pytest.approx([1 / 3, 2 / 3, 1.0])


KINDS = ("best_by_reward", "max_reward", "best_by_logprob", "best_by_mean_logprob")


def test_without_a_verdict_an_answer_neither_votes_nor_is_chosen():
    answers = [FAILED, answer(1.0), answer(0.0, text="8")]
    values = evaluate(
        Answers({"a/0": [answer(1.0)]}, {"a/0": answers}), ["a/0"], num_samples=3, maj_at=(2, 3), best_of=(2, 3)
    )
    assert values["eval/maj@2"] == 0.5
    assert values["eval/best_by_reward@2"] == 1.0
    assert not [name for name in values if name.endswith("@3")]
