"""The environment of verbalized sampling: its prompt, its candidates, its malformed responses, the credit they get."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from moerl.config.schema import RewardSection
from moerl.data.chat import ChatTokenizer
from moerl.data.rows import Row
from moerl.data.templating import PromptTemplate, PromptText, rewritten
from moerl.envs import environments
from moerl.envs.verbalized import VerbalizedConfig, check, verbalise
from moerl.errors import ConfigError, DataError
from moerl.metrics import to_floats
from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, UnscoredError
from moerl.rewards.scorer import build_scorer
from moerl.rollout.collect import Collector
from moerl.rollout.rollout_metrics import rollout_metrics
from moerl.types import Completion, Prompt, SamplingParams

PROMPT = Prompt("d/1", np.array([4, 5], dtype=np.int32), "8", "d", env="verbalized")
SIGNS = {"text_open": "[", "text_close": "]", "probability_open": "(", "probability_close": ")"}


class Says:
    """An engine that writes `texts` in turn, one token for each character, and stops."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def generate(self, token_ids, params, request_id):
        ids = np.array([ord(c) for c in self.texts.pop(0)] + [1], dtype=np.int32)
        return Completion(ids, np.full(len(ids), -0.5, np.float32), "stop", 0)


def make(**arguments):
    plugin = environments.get("verbalized")
    config = plugin.config_class(**{**SIGNS, "num_candidates": 2, **arguments})
    return plugin.target(config, decode=lambda ids: "".join(map(chr, ids)), max_context_tokens=500)


def params(**changes):
    return SamplingParams(**{"max_new_tokens": 100, "stop_token_ids": (1,), "return_routes": False, **changes})


def play(text, **arguments):
    return asyncio.run(make(**arguments).run(PROMPT, Says(text), params(), "d/1#0"))


def test_the_whole_response_is_trained_on_as_it_was_sampled():
    text = "[8](0.6)[9](0.2)"
    got = play(text)
    assert got.response_text == text
    assert got.token_ids.tolist() == [4, 5, *map(ord, text), 1]
    assert got.loss_mask.tolist() == [False] * 2 + [True] * (len(text) + 1)
    assert set(got.rollout_logprobs[2:].tolist()) == {-0.5}
    assert [(c.text, c.weight) for c in got.candidates] == [("8", pytest.approx(0.75)), ("9", pytest.approx(0.25))]
    assert got.metrics["verbalized_entropy"] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert (got.metrics["verbalized_candidates"], got.metrics["verbalized_malformed"]) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("text", "kinds"), [("", "no marker"), ("[8](-1)", "1 negative"), ("[8](0.4)[9](", "1 unterminated, 1 too_few")]
)
def test_a_malformed_response_is_an_error_that_says_why(text, kinds):
    got = play(text, min_candidates=2)
    assert got.status == "error"
    assert got.error.startswith("verbalized malformed: ")
    assert kinds in got.error
    assert math.isnan(got.reward)
    assert got.metrics["verbalized_malformed"] == 1.0
    assert got.candidates == ()


def test_copies_do_not_count_towards_min_candidates():
    assert play("[8](0.4)[8](0.4)", min_candidates=2).status == "error"
    got = play("[8](0.4)[8](0.4)")
    assert (got.status, got.metrics["verbalized_distinct"], got.metrics["verbalized_duplicate"]) == ("ok", 1.0, 1.0)


class Table:
    """A scorer that keeps the protocol: the reward of an answer, by its text; what is not in it has no verdict."""

    def __init__(self, **values: float) -> None:
        self.values = values

    async def score(self, prompt, text):
        if text not in self.values:
            raise UnscoredError("crash", "no verdict")
        return self.values[text]

    def check(self, prompts):
        return [None for _ in prompts]


@pytest.fixture
def credit():
    """Groups and metrics of responses, played and scored as in a run."""
    reward = rewards.register("table_of_test", RewardConfig)(lambda config, pool: Table(a=1.0, b=0.25, c=-2.0))
    assert reward is not None
    scorer = build_scorer(RewardSection(rewards=[{"name": "table_of_test", "weight": 2.0}], num_workers=1))
    collectors = []

    def collect(*texts, **arguments):
        environment = make(num_candidates=3, **arguments)
        collectors.append(
            Collector(
                engine=Says(*texts),
                environments={"verbalized": environment},
                scorer=scorer,
                run_seed=0,
                timeout_seconds=20.0,
            )
        )
        groups = collectors[-1].collect([PROMPT], step=1, group_size=len(texts), params=params())
        return groups[0].trajectories, to_floats(rollout_metrics(groups, 0)), to_floats(scorer.take_metrics())

    yield collect
    for collector in collectors:
        collector.close()
    scorer.close()


def test_the_reward_is_the_expectation_over_the_stated_probabilities(credit):
    """sum_j p_j R_j with p = (3, 1, 1) / 5: the component 0.6 + 0.05 - 0.4 = 0.25, the reward twice that."""
    (first, second), metrics, _ = credit("[a](0.3)[b](0.1)[c](10%)", "[b](1)")
    assert first.reward_components == {"table_of_test": pytest.approx(0.25)}
    assert first.reward == pytest.approx(0.5)
    assert second.reward == 0.5
    assert metrics["reward/table_of_test"] == pytest.approx(0.25)
    assert metrics["rollout/verbalized_candidates"] == 2.0
    assert metrics["rollout/verbalized_too_few"] == 1.0, "two are missing in one of two responses"


def test_malformed_responses_are_counted_and_are_in_no_mean_of_rewards(credit):
    (good, bad), metrics, _ = credit("[a](0.3)[b](0)", "[a](-1)[b](nan)[c")
    assert (good.status, bad.status) == ("ok", "error")
    assert metrics["reward/mean"] == 2.0
    assert metrics["rollout/errors/verbalized_malformed"] == 1.0
    assert metrics["rollout/verbalized_malformed"] == 0.5
    for kind in ("negative", "not_finite", "unterminated"):
        assert metrics[f"rollout/verbalized_{kind}"] == 0.5


def test_one_candidate_without_a_verdict_leaves_the_response_without_one(credit):
    (only,), _, errors = credit("[a](0.9)[unknown](0.1)")
    assert only.status == "error"
    assert math.isnan(only.reward)
    assert "no verdict" in only.error
    assert errors["reward/verifier_crash"] == 1.0


def test_the_prompt_asks_for_k_and_for_the_tail():
    asked = verbalise(VerbalizedConfig(num_candidates=4, tail_threshold=0.1), "What is {k} + {tail}?")
    assert asked.startswith("What is {k} + {tail}?\n\nGenerate a set of 4 possible")
    assert asked.endswith("less than 0.1.")
    assert "tails" not in verbalise(VerbalizedConfig(), "x")
    got = play("[8](0.6)[9](0.05)", tail_threshold=0.1, prompt="{question}{tail}")
    assert got.metrics["verbalized_over_threshold"] == 0.5


def test_the_task_is_rewritten_inside_the_template():
    template = PromptTemplate("t", lambda row, chat: PromptText(f"<{row.text}>"), extract="boxed", stop=())
    render = rewritten(template, lambda text: f"k of {text}").render
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert render(Row(0, "q", None, "f:1"), None).text == "<k of q>"
    assert render(Row(0, turns, None, "f:1"), None).text == "<s\nk of q>"
    assert turns[1]["content"] == "q"
    with pytest.raises(DataError, match=r"f:1: has no message of the user"):
        render(Row(0, turns[:1], None, "f:1"), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_candidates": 1}, "num_candidates=1 must be 2 or more"),
        ({"min_candidates": 0}, "min_candidates=0 must be between 1 and num_candidates=5"),
        ({"min_candidates": 6}, "min_candidates=6 must be between"),
        ({"prompt": "say it"}, "must hold {question}"),
        ({"tail_threshold": 0.0}, "tail_threshold=0.0 must be above 0"),
        ({"tail_threshold": 0.1, "prompt": "{question}"}, "has no {tail}"),
        ({"text_close": ""}, "text_close is ''"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check(VerbalizedConfig(**arguments))


def test_a_tokenizer_says_what_it_can_write():
    tokenizer = ChatTokenizer("configs/demo/policy")
    assert [tokenizer.can_write(text) for text in ("[", "\\boxed{", "<s>", "<text>", "é")] == [True] * 3 + [False] * 2
