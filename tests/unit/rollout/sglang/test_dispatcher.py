"""The dispatcher over fake servers: every request answered once, whatever the servers do."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from fake_servers import EXPECTED, SLOW, dispatching, prompt_of, should_sample, until

from moerl.errors import RolloutError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.dispatcher import DispatchSettings
from moerl.rollout.sglang.tries import drawn_wait
from moerl.types import Completion, SamplingParams

PROMPT = prompt_of(5)


def assert_sampled(got: Completion, prompt: np.ndarray, count: int, seed: int, label: str = "default") -> None:
    """Exactly what an undisturbed server samples by one version: tokens, logprobs, routes, spans of equal lengths."""
    ids, logprobs, routes = should_sample(prompt, count, seed=seed, label=label)
    np.testing.assert_array_equal(got.token_ids, ids)
    np.testing.assert_allclose(got.logprobs, logprobs, rtol=1e-6)
    assert got.routed_experts is not None
    np.testing.assert_array_equal(got.routed_experts.open(), routes)
    assert got.version_spans == ((0, count, 0 if label == "default" else int(label)),)


def test_several_hundred_at_once_are_each_answered_as_alone():
    with FakeServer() as a, FakeServer() as b:

        async def main():
            async with dispatching([a, b], requests_per_server=40) as d:
                calls = [
                    d.generate(PROMPT, SamplingParams(1 + i % 9, seed=i), f"p/{i // 8}#{i % 8}") for i in range(400)
                ]
                answers = await asyncio.gather(*calls)
                assert (d.num_in_flight, d.pool.num_running, d.pool.num_waiting) == (0, 0, 0)
                assert d.counts.completions == d.counts.requests == 400
                return answers

        for i, got in enumerate(asyncio.run(main())):
            assert_sampled(got, PROMPT, 1 + i % 9, i)
        assert a.state()["counts"]["/generate"] + b.state()["counts"]["/generate"] == 400


def test_no_server_ever_has_more_than_its_share():
    with FakeServer(SLOW) as server:

        async def main():
            async with dispatching([server], requests_per_server=3) as d:
                calls = [
                    asyncio.create_task(d.generate(PROMPT, SamplingParams(4, seed=i), f"p#{i}")) for i in range(12)
                ]
                most = 0
                while not all(call.done() for call in calls):
                    most = max(most, server.call(lambda app: len(app.state.running)))
                    assert d.pool.num_running <= 3
                    await asyncio.sleep(0.002)
                return most

        assert 1 <= asyncio.run(main()) <= 3


@pytest.mark.parametrize("kind", ["drop", "drop_after", "truncate"])
def test_a_connection_that_is_lost_sends_the_request_elsewhere_and_counts_it_once(kind):
    with FakeServer(faults=[{"kind": kind, "times": -1}]) as bad, FakeServer() as good:

        async def main():
            async with dispatching([bad, good]) as d:
                answers = await asyncio.gather(
                    *(d.generate(PROMPT, SamplingParams(6, seed=i), f"p/{i}#0") for i in range(20))
                )
                counts = d.counts
                assert counts.completions == 20
                assert counts.lost == counts.retries == counts.resent == counts.requests - 20 > 0
                assert [member.state for member in d.pool.members] == ["out", "fit"]
                return answers

        for i, got in enumerate(asyncio.run(main())):
            assert_sampled(got, PROMPT, 6, i)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_is_asked_again(status):
    with FakeServer(faults=[{"kind": "status", "status": status, "times": 2}]) as server:

        async def main():
            async with dispatching([server]) as d:
                got = await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")
                assert d.counts.retries == d.counts.busy + d.counts.broken == 2
                assert d.counts.resent == 0
                assert server.state()["counts"]["/generate"] == 3
                return got

        assert_sampled(asyncio.run(main()), PROMPT, 6, 1)


def test_errors_in_a_row_eject_and_health_brings_back():
    with FakeServer(faults=[{"kind": "status", "times": 3}]) as bad, FakeServer() as good:

        async def main():
            async with dispatching([bad, good], watch=True, affinity_slack=0) as d:
                await asyncio.gather(*(d.generate(PROMPT, SamplingParams(2, seed=i), f"p/{i}#0") for i in range(12)))
                assert d.pool.members[0].num_ejections == 1
                await until(lambda: d.pool.members[0].state == "fit")
                before = d.pool.members[0].num_answers
                await asyncio.gather(*(d.generate(PROMPT, SamplingParams(2, seed=i), f"q/{i}#0") for i in range(12)))
                assert d.pool.members[0].num_answers > before

        asyncio.run(main())


def test_a_wrong_request_is_not_tried_again():
    with FakeServer(FakeEngineConfig(context_length=5)) as server:

        async def main():
            async with dispatching([server]) as d:
                await d.generate(PROMPT, SamplingParams(6), "p#0")

        with pytest.raises(RolloutError, match=r"request p#0: .*status 400: The input \(5 tokens\) is longer"):
            asyncio.run(main())
        assert server.state()["counts"]["/generate"] == 1


BAD_ANSWERS = {
    "short_routes": "rows belong to these tokens",
    "zero_routes": "one expert twice",
    "foreign_routes": "the model has experts 0 to 7",
    "nan_logprobs": "no JSON",
    "null_logprobs": "must be a finite number",
    "few_logprobs": "5 logprobs for 6 tokens",
    "wrong_ids": "ids were changed on the way",
    "wrong_prompt": "prompt_tokens is 6, but 5 were sent",
    "wrong_rid": "the answer is that of request",
    "no_json": "no JSON",
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_wrong_answer_fails_its_request_and_is_never_trained_on(kind):
    with FakeServer(faults=[{"kind": kind}]) as server:

        async def main():
            async with dispatching([server]) as d:
                with pytest.raises(RolloutError, match=BAD_ANSWERS[kind]) as caught:
                    await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")
                assert "request p#0" in str(caught.value)
                assert server.url in str(caught.value)
                return await d.generate(PROMPT, SamplingParams(6, seed=1), "p#1")

        assert_sampled(asyncio.run(main()), PROMPT, 6, 1)


def test_an_answer_that_comes_twice_is_not_the_next_ones():
    with FakeServer(faults=[{"kind": "duplicate", "after": 1}]) as server:

        async def main():
            async with dispatching([server]) as d:
                await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")
                with pytest.raises(RolloutError, match="the answer is that of request moerl-"):
                    await d.generate(PROMPT, SamplingParams(6, seed=2), "p#1")

        asyncio.run(main())


@pytest.mark.parametrize(
    "keys", [["return_logprob"], ["return_routed_experts"], ["stop_token_ids"], ["max_new_tokens"]]
)
def test_a_server_that_ignores_an_option_is_found_out_by_its_first_answer(keys):
    """BUGS 29."""
    stop = int(should_sample(PROMPT, 6, seed=1)[0][2])
    cfg = FakeEngineConfig()
    with FakeServer(cfg, faults=[{"kind": "ignore", "keys": keys, "times": -1}]) as server:

        async def main():
            async with dispatching([server]) as d:
                await d.generate(PROMPT, SamplingParams(6, seed=1, stop_token_ids=(stop,)), "p#0")

        with pytest.raises(RolloutError, match=r"ignored|--enable-return-routed-experts"):
            asyncio.run(main())


def test_routes_that_a_router_strips_fail_the_first_request():
    """Pitfall 1."""
    with FakeServer(faults=[{"kind": "drop_keys", "keys": ["routed_experts"], "times": -1}]) as server:

        async def main():
            async with dispatching([server]) as d:
                await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")

        with pytest.raises(RolloutError, match="put no router before it"):
            asyncio.run(main())


def test_a_late_answer_is_given_up_aborted_and_asked_for_again():
    with FakeServer(faults=[{"kind": "hang"}]) as server:

        async def main():
            async with dispatching([server], request_timeout_seconds=0.2) as d:
                got = await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")
                assert d.counts.retries == d.counts.timeouts == 1
                return got

        assert_sampled(asyncio.run(main()), PROMPT, 6, 1)
        assert "/abort_request" in server.state()["calls"]


def test_retries_are_used_up_with_one_clear_error():
    with FakeServer(faults=[{"kind": "status", "status": 500, "times": -1}]) as server:

        async def main():
            async with dispatching([server], num_retries=2) as d:
                await d.generate(PROMPT, SamplingParams(6), "p#0")

        with pytest.raises(RolloutError, match=r"request p#0 \(after 2 retries\): .*status 500"):
            asyncio.run(main())
        assert server.state()["counts"]["/generate"] == 3


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_queue_uses_up_no_retry(status):
    """Before, a queue that stayed full for 8 s failed what waited for it, though the episode had minutes."""
    full = {"kind": "status", "status": status, "times": 9}
    with FakeServer(faults=[full, {"kind": "status", "status": 500, "times": 2, "after": 9}]) as server:

        async def main():
            async with dispatching([server], num_retries=2, retry_wait_seconds=0.001) as d:
                got = await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")
                assert (d.counts.busy, d.counts.broken, d.counts.retries) == (9, 2, 11)
                return got

        assert_sampled(asyncio.run(main()), PROMPT, 6, 1)


def test_a_queue_that_stays_full_is_waited_for_as_long_as_an_answer():
    with FakeServer(faults=[{"kind": "status", "status": 503, "times": -1}]) as server:

        async def main():
            async with dispatching([server], request_timeout_seconds=0.1, retry_wait_seconds=0.05) as d:
                await d.generate(PROMPT, SamplingParams(6), "p#0")

        with pytest.raises(RolloutError, match=r"request p#0 \(after [23] retries\): .*status 503"):
            asyncio.run(main())
        assert server.state()["counts"]["/generate"] in (3, 4)


@pytest.mark.parametrize("seconds", [0.0, 0.25, 1000.0])
def test_no_wait_before_a_retry_is_longer_than_ten_seconds_however_many_there_were(seconds):
    waits = [drawn_wait(DispatchSettings(retry_wait_seconds=seconds), place) for place in (1, 2, 3, 40, 5000)]
    firsts = [max(seconds, 0.001) * factor for factor in (1, 2, 4)]
    for wait, longest in zip(waits, [*firsts, 10.0, 10.0], strict=True):
        assert min(longest, 10.0) / 2 <= wait <= min(longest, 10.0)


def test_cancelling_aborts_at_the_server_that_has_the_request():
    """Pitfall 2."""
    with FakeServer(SLOW) as a, FakeServer(SLOW) as b:

        async def main():
            async with dispatching([a, b]) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(10_000), "p#0"))
                await until(lambda: d.pool.num_running == 1)
                await until(lambda: a.call(lambda app: len(app.state.running)) == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert d.num_in_flight == d.pool.num_running == 0
                await until(lambda: not a.call(lambda app: len(app.state.running)))

        asyncio.run(main())
        assert "/abort_request" in a.state()["calls"]
        assert "/abort_request" not in b.state()["calls"]


def test_an_abort_by_name_returns_what_is_there():
    with FakeServer(SLOW) as server:

        async def main():
            async with dispatching([server]) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(10_000, seed=3), "p#0"))
                await until(lambda: d.pool.num_running == 1)
                await asyncio.sleep(0.1)
                await d.abort("p#0")
                await d.abort("unknown#0")
                return await task

        got = asyncio.run(main())
        assert got.finish_reason == "abort"
        assert_sampled(got, PROMPT, len(got.token_ids), 3)


def test_an_abort_that_overtakes_its_request_is_sent_again():
    """The first finds nothing to end; without another one all 400 tokens would be sampled, for 4 s."""
    with FakeServer(SLOW, [{"kind": "slow", "seconds": 0.3}]) as server:

        async def main():
            async with dispatching([server], retry_wait_seconds=0.05) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(400, seed=3), "p#0"))
                await until(lambda: d.pool.num_running == 1)
                await d.abort("p#0")
                return await task

        got = asyncio.run(main())
        assert got.finish_reason == "abort"
        assert len(got.token_ids) < 300
        assert server.state()["counts"]["/generate"] == 1
        assert 1 < server.state()["calls"].count("/abort_request") < 20


@pytest.mark.parametrize("aborts", [1, 2])
@pytest.mark.parametrize("budget", [1, 3, 10])
def test_a_resumed_request_asks_for_the_rest_of_its_budget(budget, aborts):
    """BUGS 26: never more than the budget, and all parts of equal length, however often it was cut off."""
    with FakeServer(SLOW) as server:

        async def main():
            async with dispatching([server]) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(budget, seed=3), "p#0"))
                for _ in range(aborts):
                    await asyncio.sleep(random.uniform(0.0, 0.05))
                    await d.pause("abort")
                    await d.resume()
                got = await task
                assert d.counts.resumes == d.counts.requests - 1 <= aborts
                return got

        got = asyncio.run(main())
        assert got.finish_reason == "length"
        assert_sampled(got, PROMPT, budget, 3)


def test_without_resuming_the_part_is_the_answer():
    with FakeServer(SLOW) as server:

        async def main():
            async with dispatching([server], resume_aborted=False) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(1000, seed=3), "p#0"))
                await until(lambda: d.pool.num_running == 1)
                await asyncio.sleep(0.1)
                await d.pause("abort")
                await d.resume()
                return await task

        got = asyncio.run(main())
        assert got.finish_reason == "abort"
        assert_sampled(got, PROMPT, len(got.token_ids), 3)


@pytest.mark.parametrize(("context", "left"), [(4, None), (5, None), (6, 1), (8, 3)])
def test_a_prompt_that_fills_the_context_asks_for_nothing(context, left):
    """BUGS 28."""
    with FakeServer() as server:

        async def main():
            async with dispatching([server]) as d:
                d._context_length = context
                return await d.generate(PROMPT, SamplingParams(9, seed=1), "p#0")

        if left is None:
            with pytest.raises(RolloutError, match=f"leaves no room in a context of {context}; nothing was asked"):
                asyncio.run(main())
            assert "/generate" not in server.state()["counts"]
        else:
            assert len(asyncio.run(main()).token_ids) == left


def test_a_dispatcher_needs_servers():
    async def main():
        async with dispatching([]):
            pass

    with pytest.raises(RolloutError, match=r"set rollout.engine.urls"):
        asyncio.run(main())
    assert EXPECTED.vocab_size == 320
