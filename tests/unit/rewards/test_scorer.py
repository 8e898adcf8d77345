"""Rewards by name, their weighted sum, and answers without a verdict."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest

from moerl.config.schema import RewardSection
from moerl.data.sources import prompt_sources
from moerl.errors import ConfigError
from moerl.metrics import to_floats
from moerl.rewards.scorer import build_scorer
from moerl.types import Prompt, Trajectory


def prompt(answer, dataset="sum", **metadata):
    return Prompt(f"{dataset}/0", np.array([1], np.int32), answer, dataset, metadata=metadata)


def trajectory(text, status="ok"):
    return Trajectory(
        token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
        temperature=1.0,
        finish_reason="stop",
        version_spans=((1, 2, 0),),
        response_text=text,
        status=status,
    )


@pytest.fixture
def build():
    scorers = []

    def make(*nodes, datasets=None, timeout_seconds=5.0):
        section = RewardSection(rewards=list(nodes), num_workers=1, timeout_seconds=timeout_seconds)
        scorers.append(build_scorer(section, datasets))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


@pytest.fixture(scope="module")
def math_scorer():
    scorer = build_scorer(RewardSection(rewards=[{"name": "math_verify"}], timeout_seconds=3.0))
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def gym_scorer():
    section = RewardSection(rewards=[{"name": "reasoning_gym", "extract": "all"}], timeout_seconds=20.0)
    scorer = build_scorer(section)
    yield scorer
    scorer.close()


def score(scorer, *args):
    return asyncio.run(scorer.score(*args))


def test_weighted_sum_of_raw_components(build):
    scorer = build(
        {"name": "exact_match", "weight": 2.0},
        {"name": "boxed_format", "weight": 0.25},
        {"name": "exact_match", "id": "line", "extract": "last_line", "weight": -1.0},
    )
    scored = score(scorer, prompt("15"), trajectory("3+12\n\\boxed{15}"))
    assert scored.reward_components == {"exact_match": 1.0, "boxed_format": 1.0, "line": 0.0}
    assert scored.reward == 2.25
    assert scored.status == "ok"


def test_only_the_rewards_of_its_data_set_apply(build):
    scorer = build({"name": "exact_match", "datasets": ["sum"]}, {"name": "boxed_format", "datasets": ["other"]})
    assert score(scorer, prompt("1"), trajectory(r"\boxed{1}")).reward_components == {"exact_match": 1.0}
    assert score(scorer, prompt("1", "other"), trajectory("1")).reward_components == {"boxed_format": 0.0}


@pytest.mark.parametrize("text", ["15", r"\boxed{16}", r"\boxed{}", r"\boxed{15", "", r"\boxed{15 }}"])
def test_exact_match_zeros(build, text):
    expected = 1.0 if text == r"\boxed{15 }}" else 0.0
    assert score(build({"name": "exact_match"}), prompt("15"), trajectory(text)).reward == expected


def test_math_in_the_pool_from_a_thread_and_from_a_loop(math_scorer):
    """verl#3407: math-verify refuses threads; its processes do not care who asks."""
    scorer = math_scorer
    half = trajectory(r"so \boxed{\frac{2}{4}}")
    found = []
    thread = threading.Thread(target=lambda: found.append(score(scorer, prompt(r"$\frac{1}{2}$"), half)))
    thread.start()
    thread.join(timeout=60)
    found.append(score(scorer, prompt("0.5"), half))
    assert [f.reward for f in found] == [1.0, 1.0]
    assert score(scorer, prompt("0.25"), half).reward == 0.0
    assert score(scorer, prompt("7"), trajectory("no box")).reward == 0.0


def test_number_that_cannot_be_computed_is_never_the_answer(math_scorer):
    scored = score(math_scorer, prompt("7"), trajectory(r"\boxed{(10^{100000})!}"))
    assert scored.status == "error" or scored.reward == 0.0


def test_answer_without_verdict_is_an_error_and_is_counted(build):
    scorer = build({"name": "boxed_format"}, {"name": "regex_match", "pattern": r"(a|a)+$()"}, timeout_seconds=0.5)
    late = score(scorer, prompt("1"), trajectory("a" * 60 + "b"))
    assert late.status == "error"
    assert late.error == "reward regex_match: timeout: no verdict after 0.5 s"
    assert math.isnan(late.reward)
    assert late.reward_components == {"boxed_format": 0.0}
    assert to_floats(scorer.take_metrics()) == {
        "reward/verifier_timeout": 1.0,
        "reward/verifier_crash": 0.0,
        "reward/verifier_exception": 0.0,
    }
    assert to_floats(scorer.take_metrics())["reward/verifier_timeout"] == 0.0


MEASURING = """
from moerl.metrics import Sum
from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig

@rewards.register("counting", RewardConfig)
class Counting:
    def __init__(self, config, pool):
        self.count = 0

    async def score(self, prompt, text):
        self.count += 1
        return 1.0

    def check(self, prompts):
        return [None for _ in prompts]

    def take_metrics(self):
        count, self.count = self.count, 0
        return {"scored": Sum(float(count))}
"""


def test_what_evaluation_measures_is_apart_from_what_training_does(build, tmp_path, monkeypatch):
    """Both score at the same time; whoever is asked first must not take the other's."""
    (tmp_path / "counting_plugin.py").write_text(MEASURING)
    monkeypatch.syspath_prepend(str(tmp_path))
    training = build({"name": "code"}, {"name": "counting_plugin:counting"})
    evaluation = training.apart()
    asked = prompt(None, tests=[{"input": "", "output": "3"}])
    score(training, asked, trajectory("no program"))
    for _ in range(2):
        assert score(evaluation, asked, trajectory("no program")).reward == 1.0
    broken = prompt(None)
    assert score(evaluation, broken, trajectory("no program")).status == "error"
    found = to_floats(evaluation.take_metrics())
    assert (found["reward/code_failed_no_program"], found["reward/verifier_exception"]) == (2.0, 1.0)
    assert "reward/counting_scored" not in found, "its counts cannot be told apart, so they are left where they are"
    found = to_floats(training.take_metrics())
    assert (found["reward/code_failed_no_program"], found["reward/verifier_exception"]) == (1.0, 0.0)
    assert found["reward/counting_scored"] == 3.0


GIVING = """
from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig

@rewards.register("giving", RewardConfig)
class Giving:
    def __init__(self, config, pool):
        pass

    async def score(self, prompt, text):
        return eval(text)

    def check(self, prompts):
        return [None for _ in prompts]
"""


@pytest.mark.parametrize("value", ["10**400", "float('nan')", "'1'", "None", "[1.0]"])
def test_what_is_no_finite_number_is_no_verdict(build, tmp_path, monkeypatch, value):
    (tmp_path / "giving_plugin.py").write_text(GIVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    scorer = build({"name": "giving_plugin:giving"})
    scored = score(scorer, prompt("1"), trajectory(value))
    assert scored.status == "error"
    assert "not a finite number" in scored.error
    assert to_floats(scorer.take_metrics())["reward/verifier_exception"] == 1.0


def test_trajectory_that_already_failed_is_left_alone(build):
    failed = trajectory(r"\boxed{1}", status="too_long")
    assert score(build({"name": "exact_match"}), prompt("1"), failed) is failed


def test_regex_match(build):
    scorer = build({"name": "regex_match", "pattern": r"answer is (?P<answer>\w+)", "ignore_case": True})
    assert score(scorer, prompt("B"), trajectory("the answer is C. no, the answer is b")).reward == 1.0
    assert score(scorer, prompt("B"), trajectory("the answer is b. no, the answer is C")).reward == 0.0
    assert score(scorer, prompt("B"), trajectory("B")).reward == 0.0


def gym_prompt(task):
    plugin, options = prompt_sources.resolve({"name": "reasoning_gym", "task": task, "size": 1, "seed": 3})
    row = plugin.target(options)[0]
    return prompt(row.answer, task, **row.metadata)


@pytest.mark.parametrize("task", ["chain_sum", "rearc", "spiral_matrix", "n_queens"])
def test_reasoning_gym_scores_itself(gym_scorer, task):
    """Some entries hold tuples, which JSON does not know; they arrive as they were."""
    task_prompt = gym_prompt(task)
    assert score(gym_scorer, task_prompt, trajectory(task_prompt.answer)).reward == 1.0
    assert score(gym_scorer, task_prompt, trajectory("17 apples")).reward < 1.0


@pytest.mark.parametrize("task", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens"])
def test_reasoning_gym_tasks_that_eval_the_answer_cannot_reach_out(gym_scorer, tmp_path, task):
    """Their scorers call `eval`; the answer runs, behind the walls, and leaves no trace."""
    stolen = tmp_path / "stolen"
    for attack in (
        f"[open({str(stolen)!r}, 'w').write('x')]",
        f"[__import__('os').system('touch {stolen}')]",
        f"[__import__('subprocess').run(['touch', {str(stolen)!r}])]",
        "[__import__('os')._exit(0)]",
    ):
        scored = score(gym_scorer, gym_prompt(task), trajectory(attack))
        assert scored.status == "error" or scored.reward < 0.5
        assert not stolen.exists()


def test_gold_answers_are_checked_with_their_place(build, math_scorer):
    prompts = [
        prompt(r"$\frac{1}{2}$", source="a.jsonl:1"),
        prompt(r"\frac{", source="a.jsonl:2"),
        prompt("12", source="a.jsonl:3"),
        prompt(None, source="a.jsonl:4"),
    ]
    problems = math_scorer.check_prompts(prompts)
    assert [line.split(": ")[0] for line in problems] == ["a.jsonl:2", "a.jsonl:4"]
    assert problems[0] == (
        r"a.jsonl:2: reward math_verify: gold answer '\\frac{' does not parse as mathematics (part '\\frac{')"
    )
    assert build({"name": "reasoning_gym"}).check_prompts([prompt("1", source="a.jsonl:1")]) == [
        "a.jsonl:1: reward reasoning_gym: lacks metadata ['task', 'entry']; the reward reasoning_gym is for prompts "
        "of the "
        "source reasoning_gym"
    ]


@pytest.mark.parametrize(
    ("nodes", "datasets", "message"),
    [
        ([], None, r"reward.rewards is empty"),
        ([{"name": "exact_mach"}], None, r"did you mean 'exact_match'"),
        (
            [{"name": "exact_match", "wieght": 1}],
            None,
            r"reward.rewards\[0\] \(exact_match\): unknown key 'wieght'; did you",
        ),
        ([{"name": "exact_match", "weight": float("nan")}], None, r"weight must be a finite number"),
        ([{"name": "exact_match", "extract": "box"}], None, r"extract is 'box'; allowed: boxed, last_line"),
        ([{"name": "exact_match"}, {"name": "exact_match"}], None, r"two rewards are called 'exact_match'"),
        ([{"name": "exact_match", "datasets": ["sum"]}], ["sum", "held"], r"no reward applies to data set 'held'"),
        ([{"name": "exact_match"}, {"name": "boxed_format", "datasets": ["smu"]}], ["sum"], r"did you mean 'sum'"),
        ([{"name": "regex_match", "pattern": "("}], None, r"is no regular expression"),
        ([{"name": "regex_match", "pattern": "a"}], None, r"has no group"),
    ],
)
def test_bad_sections(build, nodes, datasets, message):
    with pytest.raises(ConfigError, match=message):
        build(*nodes, datasets=datasets)
