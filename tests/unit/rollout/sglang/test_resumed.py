"""The dispatcher's own continuations, to the token: budgets, tokens, rows and versions after any number of aborts."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from fake_servers import dispatching, prompt_of, should_sample, until

from moerl.rollout.fake_engine.app import FakeApp
from moerl.rollout.fake_engine.model import FakeModel
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.dispatcher import Dispatcher
from moerl.types import Completion, SamplingParams

PROMPT, BUDGET = prompt_of(5), 10
STILL = FakeEngineConfig(weight_version="1", token_seconds=1e6)
"""A server whose clock makes no token: the test says when one comes."""


def sampled(app: FakeApp, count: int, label: str, *, is_last: bool) -> tuple[int, list[int]]:
    """The one request gets `count` tokens, and is aborted; then the weights `label` come. Its budget and its tokens."""
    (request,) = app.state.running.values()
    request.settle(time.monotonic())
    if made := min(count, request.target):
        request._sample(made)
    request.is_aborted = not is_last
    request.changed.set()
    app.state.note_update(b"", label)
    app.state.cache.clear()
    return request.target, request.prompt


async def cut_short(server: FakeServer, d: Dispatcher, counts: list[int]) -> tuple[Completion, list]:
    """One answer, with `counts[i]` tokens of its i-th request by the weights i + 1; what each request asked."""
    d.policy_version = 1
    task = asyncio.create_task(d.generate(PROMPT, SamplingParams(BUDGET, seed=3), "p#0"))
    asked, seen = [], set()

    def is_next() -> bool:
        running = set(server.call(lambda app: [rid for rid, one in app.state.running.items() if one.is_admitted]))
        return task.done() or bool(running - seen and len(running) == 1)

    for version, count in enumerate(counts, 1):
        await until(is_next)
        if task.done():
            break
        seen |= set(server.call(lambda app: list(app.state.running)))
        asked.append(server.call(lambda app, n=count, v=version: sampled(app, n, str(v + 1), is_last=v == len(counts))))
        d.policy_version = version + 1
    return await task, asked


@pytest.mark.parametrize("first", range(BUDGET + 1))
@pytest.mark.parametrize("second", [0, 1, 4, BUDGET])
def test_an_aborted_answer_goes_on_with_the_budget_that_is_left(first, second):
    """BUGS 26: after 10 of 10 tokens nothing is asked for, and every array has one entry for each token."""
    with FakeServer(STILL) as server:

        async def main():
            async with dispatching([server]) as d:
                return await cut_short(server, d, [first, second, BUDGET])

        got, asked = asyncio.run(main())
    used = [0, first, min(BUDGET, first + second)]
    assert asked == [(BUDGET - u, [*PROMPT, *got.token_ids[:u]]) for u in used if u < BUDGET]
    assert got.finish_reason == "length"
    ends = [*used[1:], BUDGET]
    spans = tuple((start, end, i) for i, (start, end) in enumerate(zip(used, ends, strict=True), 1) if start < end)
    assert got.version_spans == spans
    assert got.policy_version == spans[-1][2]
    assert len(got.token_ids) == len(got.logprobs) == spans[-1][1] == BUDGET
    assert got.routed_experts is not None
    rows = got.routed_experts.open()
    assert len(rows) == len(PROMPT) + BUDGET - 1
    first_row, text = 0, np.concatenate([PROMPT, got.token_ids])
    for start, end, version in spans:
        ids, logprobs, _ = should_sample(PROMPT, BUDGET, seed=3, label=str(version))
        np.testing.assert_array_equal(got.token_ids[start:end], ids[start:end])
        np.testing.assert_allclose(got.logprobs[start:end], logprobs[start:end], rtol=1e-6)
        end_row, made = len(PROMPT) + end - 1, FakeModel(STILL).routes(str(version), text[:-1], 0)
        np.testing.assert_array_equal(rows[first_row:end_row], made[first_row:end_row])
        first_row = end_row
