"""The dispatcher over updates and restarts, and where it sends what."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from fake_servers import QUICK_WATCH, SLOW, dispatching, prompt_of, should_sample, until

from moerl.errors import RolloutError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.pool import Pool
from moerl.rollout.sglang.watch import WatchSettings
from moerl.types import SamplingParams

PROMPT = prompt_of(5)


def test_a_group_stays_together_until_its_lane_is_too_full():
    with FakeServer(SLOW) as a, FakeServer(SLOW) as b:

        async def main(slack: int):
            async with dispatching([a, b], affinity_slack=slack) as d:
                calls = [d.generate(PROMPT, SamplingParams(3, seed=i), f"p#{i}") for i in range(8)]
                await asyncio.gather(*calls)
                return sorted(member.num_answers for member in d.pool.members)

        assert asyncio.run(main(8)) == [0, 8]
        assert asyncio.run(main(2)) == [3, 5]
        assert asyncio.run(main(0)) == [4, 4]


def test_ranks_of_one_server_share_the_load_and_are_named():
    with FakeServer(FakeEngineConfig(data_size=4, token_seconds=0.01)) as server:

        async def main():
            async with dispatching([server], affinity_slack=0) as d:
                d.pool.set_ranks(d.pool.members[0], 4)
                calls = [
                    asyncio.create_task(d.generate(PROMPT, SamplingParams(20, seed=i), f"p#{i}")) for i in range(8)
                ]
                await until(lambda: server.call(lambda app: len(app.state.running)) == 8)
                ranks = server.call(lambda app: [one.data_rank for one in app.state.running.values()])
                await asyncio.gather(*calls)
                return Counter(ranks)

        assert asyncio.run(main()) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_restarted_server_serves_only_after_its_weights_came_again():
    """Pitfall 25: version 5 was published; a server that was started anew has those of its start."""
    with FakeServer() as server:
        server.call(lambda app: app.state.note_update(b"", "5"))
        replayed = []

        async def replay(client):
            replayed.append(client.index)
            server.call(lambda app: app.state.note_update(b"", "5"))
            return True

        async def main():
            async with dispatching([server], watch=True, replay=replay) as d:
                d.policy_version = 5
                first = await d.generate(PROMPT, SamplingParams(4, seed=1), "p#0")
                server.restart(0.1)
                return first, await d.generate(PROMPT, SamplingParams(4, seed=1), "p#1")

        for got in asyncio.run(main()):
            ids, _, routes = should_sample(PROMPT, 4, seed=1, label="5")
            np.testing.assert_array_equal(got.token_ids, ids)
            np.testing.assert_array_equal(got.routed_experts.open(), routes)
        assert replayed
        assert server.state()["num_restarts"] == 1


def test_what_waits_fails_when_no_server_comes_back():
    with FakeServer(
        faults=[{"kind": "drop", "times": -1}, {"kind": "drop", "endpoint": "/health", "times": -1}]
    ) as bad:

        async def main():
            soon = WatchSettings(first_probe_seconds=0.02, longest_probe_seconds=0.1, no_server_seconds=0.2)
            async with dispatching([bad], watch=True, watch_settings=soon) as d:
                await asyncio.wait_for(d.generate(PROMPT, SamplingParams(4), "p#0"), 20)

        with pytest.raises(RolloutError, match=r"no server was fit for 0.2 s \(server 0 .*see their logs"):
            asyncio.run(main())


DEAD = [{"kind": "drop", "endpoint": f"/{name}", "times": -1} for name in ("generate", "health")]


def test_what_waits_does_not_fail_while_a_server_is_being_started():
    """Before, the run ended at `no_server_seconds` although moerl was still starting the server."""
    with FakeServer(faults=DEAD) as server:

        async def revive(index, is_hung):
            await asyncio.sleep(3.0)
            server.set_faults()
            return True

        async def main():
            patient = WatchSettings(first_probe_seconds=0.02, longest_probe_seconds=0.1, no_server_seconds=2.0)
            async with dispatching([server], watch=True, watch_settings=patient, revive=revive) as d:
                return await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")

        np.testing.assert_array_equal(asyncio.run(main()).token_ids, should_sample(PROMPT, 6, seed=1)[0])


def test_a_start_that_the_system_refuses_is_tried_again():
    """As where no more files can be opened; before, nobody looked after that server any more."""
    tries = []
    with FakeServer(faults=DEAD) as server:

        async def revive(index, is_hung):
            tries.append(index)
            if len(tries) == 1:
                raise OSError(24, "Too many open files")
            server.set_faults()
            return True

        async def main():
            soon = WatchSettings(first_probe_seconds=0.02, longest_probe_seconds=0.1, no_server_seconds=5.0)
            async with dispatching([server], watch=True, watch_settings=soon, revive=revive) as d:
                return await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")

        np.testing.assert_array_equal(asyncio.run(main()).token_ids, should_sample(PROMPT, 6, seed=1)[0])
    assert len(tries) >= 2


@pytest.mark.parametrize("comes_up", [True, False])
def test_servers_that_are_started_again_and_again_are_not_waited_for_without_an_end(comes_up):
    with FakeServer(faults=DEAD) as server:

        async def revive(index, is_hung):
            await asyncio.sleep(0.3)
            if not comes_up:
                raise RolloutError("it was not healthy")
            return True

        async def main():
            soon = WatchSettings(first_probe_seconds=0.02, longest_probe_seconds=0.1, no_server_seconds=0.5)
            async with dispatching([server], watch=True, watch_settings=soon, revive=revive) as d:
                await asyncio.wait_for(d.generate(PROMPT, SamplingParams(4), "p#0"), 60)

        with pytest.raises(RolloutError, match=r"no server was fit for 0.5 s"):
            asyncio.run(main())


def test_times_without_a_server_are_summed(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("moerl.rollout.sglang.pool.monotonic", lambda: now[0])
    pool = Pool([SglangClient(f"http://127.0.0.1:{port}") for port in (1, 2)], capacity=1, slack=0)
    one, other = pool.members
    spent = []
    for seconds, happens in (
        (1.0, lambda: pool.eject(one, "the test")),
        (2.0, lambda: pool.eject(other, "the test")),
        (4.0, lambda: pool.eject(other, "it is out already")),
        (8.0, lambda: pool.readmit(one)),
        (16.0, lambda: pool.readmit(other)),
        (32.0, lambda: pool.eject(one, "the test")),
        (64.0, lambda: pool.eject(other, "the test")),
        (128.0, lambda: None),
    ):
        now[0] += seconds
        happens()
        spent.append(pool.seconds_without_fit)
    assert spent == [0, 0, 4, 12, 12, 12, 12, 140]


def test_weights_of_another_trainer_are_no_answer():
    with FakeServer() as server:

        async def main():
            async with dispatching([server]) as d:
                d.policy_version = 3
                server.call(lambda app: app.state.note_update(b"", "4"))
                await d.generate(PROMPT, SamplingParams(4), "p#0")

        words = r"request p#0: .*policy version 4, although 3 is the newest .*another trainer publishes to this server"
        with pytest.raises(RolloutError, match=words):
            asyncio.run(main())


HANGS = [
    {"kind": "hang", "endpoint": f"/{name}", "times": -1} for name in ("generate", "health", "continue_generation")
]


def test_requests_of_a_server_that_went_silent_are_sent_elsewhere():
    """Long before `request_timeout_seconds`: its sockets stay open, so nothing else tells."""
    with FakeServer(faults=HANGS) as silent, FakeServer() as good:

        async def main():
            async with dispatching([silent, good], watch=True, health_seconds=0.3, affinity_slack=0) as d:
                calls = [d.generate(PROMPT, SamplingParams(6, seed=i), f"p/{i}#0") for i in range(4)]
                answers = await asyncio.gather(*calls)
                assert d.pool.members[0].why_out.startswith("its health check failed (")
                assert (d.counts.completions, d.pool.num_running, d.num_in_flight) == (4, 0, 0)
                return answers

        for i, got in enumerate(asyncio.run(main())):
            np.testing.assert_array_equal(got.token_ids, should_sample(PROMPT, 6, seed=i)[0])
        assert silent.state()["counts"]["/generate"] == 2


MISSES = {
    "late": {"kind": "hang"},
    "its own limit": {"kind": "status", "status": 503},
    "gone": {"kind": "drop"},
}


@pytest.mark.parametrize(
    ("miss", "times", "lost"),
    [("late", 1, 0), ("its own limit", 1, 0), ("late", 2, 1), ("its own limit", 2, 1), ("gone", 2, 1)],
)
def test_a_health_check_that_is_missed_once_ejects_and_the_next_one_cuts(miss, times, lost):
    """Before, one check that was late dropped every request that the server had. aiohttp itself asks again where a
    connection broke, so two of those are one miss.
    """
    with FakeServer(SLOW, faults=[{**MISSES[miss], "endpoint": "/health", "times": times}]) as server:

        async def main():
            async with dispatching([server], watch=True, health_seconds=1.0) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(100_000, seed=3), "p#0"))
                await until(lambda: d.pool.members[0].num_returns == 1)
                await until(lambda: server.state()["counts"]["/generate"] == d.counts.requests == 1 + lost)
                await until(lambda: server.call(lambda app: len(app.state.running)) == 1)
                await d.abort("p#0")
                got = await task
                assert d.pool.members[0].num_ejections == 1
                assert (d.counts.lost, d.counts.retries) == (lost, lost)
                return got

        got = asyncio.run(main())
        np.testing.assert_array_equal(got.token_ids, should_sample(PROMPT, len(got.token_ids), seed=3)[0])


def test_a_server_that_missed_an_update_gives_up_what_it_has_before_it_gets_the_weights():
    """They go on by the old ones; the load would wait for their end, and the next update for the load."""
    with FakeServer(SLOW, faults=[{"kind": "hang", "endpoint": "/health"}]) as server:
        lost = []

        async def main():
            async def replay(client):
                await until(lambda: not server.state()["running"])
                lost.append(d.counts.lost)
                server.call(lambda app: app.state.note_update(b"", "1"))
                return True

            async with dispatching([server], watch=True, health_seconds=1.0, replay=replay) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(100_000, seed=3), "p#0"))
                await until(lambda: d.pool.members[0].state == "out")
                d.policy_version, d.is_published = 1, True
                await until(lambda: d.pool.members[0].state == "fit" and d.pool.num_running)
                await until(lambda: server.call(lambda app: len(app.state.running)) == 1)
                await asyncio.sleep(0.1)
                await d.abort("p#0")
                return await task

        got = asyncio.run(main())
        assert lost == [1]
        assert {version for _, _, version in got.version_spans} == {1}


def test_a_server_that_went_silent_after_it_was_taken_out_keeps_no_request():
    """Nobody checks the health of one that is out, but whether it answers when it is asked to come back."""
    with FakeServer(faults=HANGS) as silent, FakeServer() as good:

        async def main():
            async with dispatching([silent, good], watch=True, health_seconds=0.3) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(6, seed=1), "p#0"))
                await until(lambda: d.pool.num_running == 1)
                d.eject(d.pool.members[0], "three answers were 500")
                return await task

        np.testing.assert_array_equal(asyncio.run(main()).token_ids, should_sample(PROMPT, 6, seed=1)[0])


def test_cancelling_a_request_that_is_cut_at_the_same_time_cancels_it():
    with FakeServer(faults=HANGS) as silent:

        async def main():
            async with dispatching([silent]) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(6), "p#0"))
                await until(lambda: silent.state()["counts"].get("/generate"))
                d.cut(d.pool.members[0])
                task.cancel()
                await asyncio.wait({task})
                return task.cancelled(), d.num_in_flight, d.pool.num_running

        assert asyncio.run(main()) == (True, 0, 0)


def test_a_server_that_stays_silent_is_started_anew_though_its_process_lives():
    with FakeServer(faults=HANGS) as server:
        asked = []

        async def revive(index, is_hung):
            asked.append(is_hung)
            if is_hung:
                server.set_faults()
            return is_hung

        async def main():
            async with dispatching([server], watch=True, health_seconds=0.1, revive=revive) as d:
                return await d.generate(PROMPT, SamplingParams(6, seed=1), "p#0")

        np.testing.assert_array_equal(asyncio.run(main()).token_ids, should_sample(PROMPT, 6, seed=1)[0])
        assert asked == [False] * QUICK_WATCH.probes_to_restart + [True]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_over_an_update_every_token_says_who_sampled_it_and_every_row_who_made_it(mode):
    """Pitfall 21, for each pause mode: tokens, logprobs and routes are held to the version that the spans name."""
    with FakeServer(SLOW) as server:

        async def main():
            async with dispatching([server]) as d:
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(20, seed=3), "p#0"))
                await until(lambda: server.call(lambda app: len(app.state.running)) == 1)
                await asyncio.sleep(0.08)
                await d.pause(mode)
                server.call(lambda app: app.state.note_update(b"", "1"))
                d.policy_version = 1
                await d.resume()
                return await task

        got = asyncio.run(main())
    assert [version for _, _, version in got.version_spans] == [0, 1]
    cut = got.version_spans[0][1]
    assert len(got.token_ids) == len(got.logprobs) == got.version_spans[-1][1] == 20
    old_ids, old_logprobs, old_routes = should_sample(PROMPT, 20, seed=3)
    new_ids, new_logprobs, _ = should_sample(PROMPT, 20, seed=3, label="1")
    np.testing.assert_array_equal(got.token_ids, np.concatenate([old_ids[:cut], new_ids[cut:]]))
    np.testing.assert_allclose(got.logprobs, np.concatenate([old_logprobs[:cut], new_logprobs[cut:]]), rtol=1e-6)
    assert got.routed_experts is not None
    rows = got.routed_experts.open()
    assert len(rows) == 5 + 20 - 1
    is_old = (rows[: 5 + cut - 1] == old_routes[: 5 + cut - 1]).all()
    if mode == "retract":
        assert not is_old
        assert got.first_true_route == 5 + cut - 1
    else:
        assert is_old
        assert got.first_true_route == 0


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_an_answer_over_an_update_that_does_not_say_which_token_is_whose_is_refused(mode):
    """BUGS 29: its one label is that of the end, so the old policy's tokens would be trained on as the new one's."""
    with FakeServer(SLOW, faults=[{"kind": "drop_keys", "keys": ["weight_versions"], "times": -1}]) as server:

        def num_sampled(app):
            app.state.settle()
            return sum(request.count for request in app.state.running.values())

        async def main():
            async with dispatching([server]) as d:
                before = await d.generate(PROMPT, SamplingParams(3, seed=3), "p#0")
                assert before.version_spans == ((0, 3, 0),), "until an update its one label is that of all"
                task = asyncio.create_task(d.generate(PROMPT, SamplingParams(100, seed=3), "p#1"))
                await until(lambda: server.call(num_sampled) >= 2)
                await d.pause(mode)
                server.call(lambda app: app.state.note_update(b"", "1"))
                d.policy_version = 1
                await d.resume()
                return await task

        if mode == "abort":
            assert [version for _, _, version in asyncio.run(main()).version_spans] == [0, 1]
        else:
            with pytest.raises(RolloutError, match=r"request p#1: .*no weight_versions, although .* pause_mode=abort"):
                asyncio.run(main())
