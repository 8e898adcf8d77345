"""Routes over several turns: each asks for the rows that are missing, and together they are those of one whole pass."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_servers import LAYOUT, SLOW, dispatching, prompt_of, until

from moerl.envs.episode import Episode
from moerl.envs.turns import play_turn
from moerl.errors import RolloutError
from moerl.rollout.fake_engine.app import FakeApp
from moerl.rollout.fake_engine.model import FakeModel
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.dispatcher import Dispatcher
from moerl.types import Completion, LocalArray, SamplingParams

PROMPT, TURN, TOOL = prompt_of(5), 6, np.array([40, 41, 42], dtype=np.int32)


@contextlib.asynccontextmanager
async def engine_over(server: FakeServer, **settings: Any) -> AsyncIterator[Dispatcher]:
    async with dispatching([server], **settings) as dispatcher:
        yield dispatcher


async def turn(episode: Episode, engine: Any, params: SamplingParams) -> None:
    await play_turn(episode, engine, params, "p#0", budget=TURN, max_aborts=8)


def an_episode() -> Episode:
    return Episode(PROMPT, temperature=1.0, wants_routes=True)


def rows_of(server: FakeServer) -> int:
    return server.state()["counts"]["route_rows"]


def whole_pass(tokens: np.ndarray, label: str = "default") -> np.ndarray:
    """Every row but the last token's, as one forward of the whole text makes them."""
    return FakeModel(FakeEngineConfig()).routes(label, tokens[:-1], 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("context", [0, 1, 3])
def test_three_turns_have_the_rows_of_one_whole_pass_and_each_row_travels_once(context, temperature):
    params = SamplingParams(TURN, temperature=temperature, seed=9)
    with FakeServer() as server:

        async def main() -> tuple[Any, list[int]]:
            async with engine_over(server) as engine:
                episode, sent = an_episode(), []
                for number in range(3):
                    if number:
                        episode.add_context(TOOL[:context])
                    await turn(episode, engine, params)
                    sent.append(rows_of(server))
                return episode.finish(text="", finish_reason="stop"), sent

        found, sent = asyncio.run(main())
    length = len(PROMPT) + 3 * TURN + 2 * context
    assert len(found.token_ids) == length
    ids = FakeModel(FakeEngineConfig()).tokens("default", 9 - len(PROMPT), 0, length)[0]
    np.testing.assert_array_equal(found.token_ids[found.loss_mask], ids[found.loss_mask], "one seed over the turns")
    rows = found.routed_experts.open()
    np.testing.assert_array_equal(rows[:-1], whole_pass(found.token_ids))
    assert found.has_route.tolist() == [True] * (length - 1) + [False]
    first = len(PROMPT) + TURN - 1
    assert sent == [first, first + TURN + context, first + 2 * (TURN + context)]
    assert sent[-1] == length - 1, "no row was asked for twice"


def test_the_last_token_of_a_turn_is_routed_by_the_weights_of_the_next():
    """It runs when the next turn prefills it: before, it was sampled and never fed."""
    params = SamplingParams(TURN, seed=9)
    with FakeServer() as server:

        async def main() -> Any:
            async with engine_over(server) as engine:
                episode = an_episode()
                await turn(episode, engine, params)
                server.call(lambda app: app.state.note_update(b"", "1"))
                engine.policy_version = 1
                server.call(lambda app: app.state.cache.clear())
                episode.add_context(TOOL)
                await turn(episode, engine, params)
                return episode.finish(text="", finish_reason="stop")

        found = asyncio.run(main())
    boundary = len(PROMPT) + TURN - 1
    rows = found.routed_experts.open()[:-1]
    np.testing.assert_array_equal(rows[:boundary], whole_pass(found.token_ids)[:boundary])
    np.testing.assert_array_equal(rows[boundary:], whole_pass(found.token_ids, "1")[boundary:])
    assert not np.array_equal(rows[boundary], whole_pass(found.token_ids)[boundary])
    assert found.version_spans == ((5, 11, 0), (14, 20, 1))
    assert found.has_route[:-1].all()


def test_rows_of_a_later_turn_that_newer_weights_made_again_are_not_replayed():
    """Pitfall 21: the first turn's rows stay; of the second, those before the update are of no sampling policy."""
    params = SamplingParams(TURN, seed=9)

    async def sampled(server: FakeServer, count: int) -> None:
        """The clock makes no token: the one request has `count` more."""

        def sample(app: FakeApp) -> None:
            (request,) = app.state.running.values()
            request.settle(time.monotonic())
            request._sample(count)
            request.changed.set()

        await until(lambda: server.call(lambda app: any(one.started for one in app.state.running.values())))
        server.call(sample)

    with FakeServer(FakeEngineConfig(token_seconds=1e6)) as server:

        async def main() -> Any:
            async with engine_over(server) as engine:
                episode = an_episode()
                playing = asyncio.create_task(turn(episode, engine, params))
                await sampled(server, TURN)
                await playing
                episode.add_context(TOOL)
                playing = asyncio.create_task(turn(episode, engine, params))
                await sampled(server, 2)
                await engine.pause("retract")
                server.call(lambda app: app.state.note_update(b"", "1"))
                engine.policy_version = 1
                await engine.resume()
                await sampled(server, TURN - 2)
                await playing
                return episode.finish(text="", finish_reason="stop")

        found = asyncio.run(main())
    kept, length = len(PROMPT) + TURN - 1, len(found.token_ids)
    start = len(PROMPT) + TURN + len(TOOL)
    assert found.version_spans == ((5, 5 + TURN, 0), (start, start + 2, 0), (start + 2, length, 1))
    true_from = start + 2 - 1
    mask = [True] * kept + [False] * (true_from - kept) + [True] * (length - 1 - true_from) + [False]
    assert found.has_route.tolist() == mask
    rows = found.routed_experts.open()[:-1]
    np.testing.assert_array_equal(rows[:kept], whole_pass(found.token_ids)[:kept])
    np.testing.assert_array_equal(rows[kept:], whole_pass(found.token_ids, "1")[kept:])


@pytest.mark.parametrize("resumes_itself", [True, False], ids=["dispatcher resumes", "environment resumes"])
def test_turns_that_are_cut_off_bring_every_row_once_too(resumes_itself):
    params = SamplingParams(TURN, seed=9)
    with FakeServer(SLOW) as server:

        async def main() -> tuple[Any, int]:
            async with engine_over(server, resume_aborted=resumes_itself) as engine:
                episode = an_episode()
                for number in range(2):
                    if number:
                        episode.add_context(TOOL)
                    playing = asyncio.create_task(turn(episode, engine, params))
                    await until(lambda: engine.pool.num_running == 1)
                    await asyncio.sleep(0.03)
                    await engine.pause("abort")
                    await engine.resume()
                    await playing
                return episode.finish(text="", finish_reason="stop"), rows_of(server)

        found, sent = asyncio.run(main())
    length = len(PROMPT) + 2 * TURN + len(TOOL)
    assert len(found.token_ids) == length
    np.testing.assert_array_equal(found.routed_experts.open()[:-1], whole_pass(found.token_ids))
    assert length - 1 <= sent < length - 1 + 2 * TURN


def test_a_server_that_sends_all_rows_all_the_same_is_found_out():
    rule = {"kind": "ignore", "keys": ["routed_experts_start_len"], "after": 1}
    with FakeServer(faults=[rule]) as server:

        async def main() -> None:
            async with engine_over(server) as engine:
                episode = an_episode()
                await turn(episode, engine, SamplingParams(TURN, seed=9))
                episode.add_context(TOOL)
                await turn(episode, engine, SamplingParams(TURN, seed=9))

        with pytest.raises(RolloutError, match="routed_experts_start_len was ignored"):
            asyncio.run(main())


def completion(rows: int, routes_from: int) -> Completion:
    routes = LocalArray(np.zeros((rows, LAYOUT.num_layers, LAYOUT.experts_per_token), dtype=np.uint8))
    tokens = np.full(3, 7, dtype=np.int32)
    logprobs = np.zeros(3, dtype=np.float32)
    return Completion(tokens, logprobs, "stop", 0, routed_experts=routes, routes_from=routes_from)


def test_an_engine_may_send_all_rows_or_the_missing_ones_and_nothing_between_is_taken():
    params = SamplingParams(3)
    for routes_from in (0, 4, 7):
        episode = an_episode()
        episode.add(completion(7, 0), params, "r")
        assert episode.num_routed == 7
        episode.add(completion(10 - routes_from, routes_from), params, "r")
        assert episode.num_routed == 10
    episode = an_episode()
    episode.add(completion(7, 0), params, "r")
    with pytest.raises(RolloutError, match=r"request r: routes begin at row 8, but rows from 7 on were asked for"):
        episode.add(completion(2, 8), params, "r")
    with pytest.raises(RolloutError, match=r"from row 7; 8 tokens in and 3 out make 3 rows"):
        episode.add(completion(4, 7), params, "r")


def test_rows_beyond_the_prompt_are_not_asked_for():
    with FakeServer() as server:

        async def main() -> None:
            async with engine_over(server) as engine:
                await engine.generate(PROMPT, replace(SamplingParams(3), routes_from=6), "p#0")

        with pytest.raises(RolloutError, match="request p#0: routes_from is 6, but must be a row of the prompt's 5"):
            asyncio.run(main())
