"""One prompt, one answer: alignment, budgets, continuations, and every way an engine can break its protocol."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from moerl.envs import environments
from moerl.errors import RolloutError
from moerl.types import Completion, LocalArray, Prompt, SamplingParams, Support

PROMPT = Prompt("d/1", np.array([4, 5, 6, 7], dtype=np.int32), None, "d")
L, K = 2, 3


def routes(rows: int, base: int = 0) -> LocalArray:
    """Row r holds base + r everywhere."""
    return LocalArray(np.broadcast_to((base + np.arange(rows))[:, None, None], (rows, L, K)).astype(np.uint8))


def completion(tokens, prompt_length: int, *, finish="stop", version=5, base=0, **changes) -> Completion:
    count = len(tokens)
    made = Completion(
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=-np.array(tokens, dtype=np.float32),
        finish_reason=finish,
        policy_version=version,
        routed_experts=routes(prompt_length + count - 1, base),
    )
    return replace(made, **changes)


class Scripted:
    """An engine that gives `answers` one after the other; an answer may be a function of (prompt, params)."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, token_ids, params, request_id):
        assert request_id == "d/1#0"
        self.asked.append((token_ids.tolist(), params))
        answer = self.answers.pop(0)
        return answer(token_ids, params) if callable(answer) else answer


def play(engine, *, prompt=PROMPT, context=64, max_aborts=8, **params):
    plugin = environments.get("single_turn")
    env = plugin.target(
        plugin.config_class(max_aborts=max_aborts),
        decode=lambda ids: " ".join(str(int(i)) for i in ids),
        max_context_tokens=context,
    )
    params = SamplingParams(**{"max_new_tokens": 10, "seed": 3, "stop_token_ids": (1,), "temperature": 0.7, **params})
    return asyncio.run(env.run(prompt, engine, params, "d/1#0"))


def test_every_array_of_the_trajectory_is_aligned_by_token():
    support = Support(np.array([8, 9, 2, 1], dtype=np.int32), np.array([0, 2, 2, 4]))
    got = play(Scripted(completion([8, 2, 1], 4, support=support)))
    assert got.token_ids.tolist() == [4, 5, 6, 7, 8, 2, 1]
    assert got.loss_mask.tolist() == [False] * 4 + [True] * 3
    assert got.rollout_logprobs.tolist() == [0, 0, 0, 0, -8, -2, -1]
    assert got.rollout_logprobs.dtype == np.float32
    assert got.version_spans == ((4, 7, 5),)
    assert got.routed_experts.shape == (7, L, K)
    assert got.routed_experts.open()[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert got.has_route.tolist() == [True] * 6 + [False]
    assert got.support.offsets.tolist() == [0, 0, 0, 0, 0, 2, 2, 4]
    assert got.support.ids.tolist() == [8, 9, 2, 1]
    assert (got.finish_reason, got.status, got.temperature) == ("stop", "ok", 0.7)
    assert np.isnan(got.reward)


def test_the_text_lacks_the_stop_token_and_only_that():
    assert play(Scripted(completion([1, 8, 1], 4))).response_text == "1 8"
    assert play(Scripted(completion([8, 9], 4, finish="length"))).response_text == "8 9"
    assert play(Scripted(completion([1], 4))).response_text == ""


@pytest.mark.parametrize("rows", [5, 7, 0])
def test_another_number_of_route_rows_is_refused(rows):
    """Prompt 4, response 3: exactly 6 rows."""
    with pytest.raises(
        RolloutError, match=rf"d/1#0: routes of shape \({rows}, 2, 3\); 4 tokens in and 3 out make 6 rows"
    ):
        play(Scripted(completion([8, 2, 1], 4, routed_experts=routes(rows))))


@pytest.mark.parametrize("first", [0, 1, 4, 6])
def test_rows_that_newer_weights_made_are_not_replayed(first):
    """Pitfall 21: the engine says from which row on they are those of the policy that sampled."""
    got = play(Scripted(completion([8, 2, 1], 4, first_true_route=first)))
    assert got.has_route.tolist() == [False] * first + [True] * (6 - first) + [False]
    assert got.routed_experts.open()[:6, 0, 0].tolist() == list(range(6))


def test_rows_of_a_continuation_that_newer_weights_made_are_not_replayed_either():
    whole = completion([9, 1], 7, first_true_route=5)  # of four tokens in and three out six rows are here before it
    got = play(Scripted(abort_after(3, 1), whole))
    assert got.has_route.tolist() == [True] * 8 + [False], "those that are here already stay the sampler's"
    whole = completion([9, 1], 7, first_true_route=7)
    got = play(Scripted(abort_after(3, 1), whole))
    assert got.has_route.tolist() == [True] * 6 + [False, True, False]


def test_no_routes_are_no_routes():
    got = play(Scripted(completion([8, 1], 4, routed_experts=None)))
    assert got.routed_experts is None
    assert got.has_route is None
    got = play(Scripted(completion([8, 1], 4)), return_routes=False)
    assert got.routed_experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(2, dtype=np.float32)}, r"logprobs of shape \(2,\) for 3 tokens"),
        ({"logprobs": np.zeros(0, dtype=np.float32)}, r"logprobs of shape \(0,\) for 3 tokens"),
        ({"support": Support(np.zeros(3, np.int32), np.array([0, 1, 3]))}, "support offsets of length 3"),
        ({"support": Support(np.zeros(3, np.int32), np.array([0, 1, 2, 4]))}, "3 ids"),
        ({"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}, "answered with no tokens"),
    ],
)
def test_an_answer_that_breaks_the_protocol_names_its_request(changes, message):
    with pytest.raises(RolloutError, match=f"request d/1#0.*{message}"):
        play(Scripted(completion([8, 2, 1], 4, **changes)))


def test_more_tokens_than_asked_for_are_refused():
    with pytest.raises(RolloutError, match="11 tokens came, 10 at most"):
        play(Scripted(completion([8] * 11, 4, finish="length")))


@pytest.mark.parametrize(("context", "asked"), [(5, [1]), (4, []), (3, []), (13, [9]), (14, [10]), (15, [10])])
def test_the_budget_is_what_the_context_leaves(context, asked):
    """Prompt of 4: at context - 1 one token is asked for, at the context and above nothing."""
    engine = Scripted(lambda ids, p: completion([8] * p.max_new_tokens, len(ids), finish="length"))
    got = play(engine, context=context)
    assert [params.max_new_tokens for _, params in engine.asked] == asked
    if asked:
        assert (got.status, len(got.token_ids)) == ("ok", 4 + asked[0])
    else:
        assert (got.status, got.token_ids.tolist()) == ("too_long", [4, 5, 6, 7])
        assert not got.loss_mask.any()
        assert got.error == f"prompt of 4 tokens fills the context of {context}"
        assert got.version_spans == ()


def abort_after(count: int, version: int, base: int = 0):
    def answer(ids, params):
        tokens = [8 + i for i in range(min(count, params.max_new_tokens))]
        return completion(tokens, len(ids), finish="abort", version=version, base=base)

    return answer


@pytest.mark.parametrize("first", range(11))
@pytest.mark.parametrize("second", [0, 1, 4])
def test_an_aborted_answer_is_continued_with_the_budget_that_is_left(first, second):
    engine = Scripted(
        abort_after(first, 1),
        abort_after(second, 2, base=50),
        lambda ids, p: completion([9] * p.max_new_tokens, len(ids), finish="length", version=3, base=100),
    )
    got = play(engine)
    budgets = [params.max_new_tokens for _, params in engine.asked]
    used = [0, first, first + second]
    assert budgets == [10 - u for u in used if u < 10]
    assert got.response_length == 10
    assert (got.status, got.finish_reason) == ("ok", "length")
    assert len(got.token_ids) == len(got.rollout_logprobs) == len(got.loss_mask) == len(got.has_route) == 14
    assert [ids for ids, _ in engine.asked] == [got.token_ids[: 4 + u].tolist() for u in used if u < 10]
    spans = [(4, 4 + first, 1), (4 + first, 4 + min(10, first + second), 2), (4 + min(10, first + second), 14, 3)]
    assert got.version_spans == tuple(span for span in spans if span[0] < span[1])
    rows = got.routed_experts.open()[:, 0, 0].tolist()
    mine = [0] * (3 + first) + [50] * (min(10, first + second) - first) + [100] * 14
    assert rows == [base + row for row, base in enumerate(mine[:13])] + [0]
    assert got.has_route.tolist() == [True] * 13 + [False]


def test_continuations_draw_other_random_numbers():
    engine = Scripted(abort_after(3, 1), abort_after(2, 1), completion([1], 9))
    play(engine)
    assert [params.seed for _, params in engine.asked] == [3, 6, 8]


def test_the_same_version_twice_is_one_span():
    engine = Scripted(abort_after(3, 7), completion([9, 1], 7, version=7))
    assert play(engine).version_spans == ((4, 9, 7),)


def test_endless_aborts_end_the_episode():
    got = play(Scripted(*[abort_after(0, 1)] * 4), max_aborts=3)
    assert (got.status, got.finish_reason, got.response_length) == ("aborted", "abort", 0)
    assert got.error == "request d/1#0 was aborted 4 times"


def test_an_empty_prompt_is_refused_by_name():
    with pytest.raises(RolloutError, match="prompt d/1 has no tokens"):
        play(Scripted(), prompt=replace(PROMPT, token_ids=np.zeros(0, dtype=np.int32)))
