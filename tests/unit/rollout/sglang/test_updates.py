"""Updates of several servers as one transaction: whole on every server that serves, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_servers import LAYOUT, SLOW, prompt_of, should_sample, until

from moerl.checksums import checksum
from moerl.errors import ConfigError, RolloutError, WeightSyncError
from moerl.rollout.engine import ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.types import SamplingParams, WeightBucket
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender

PROMPT = prompt_of(5)


def buckets(version: int, parts: int = 2) -> list[WeightBucket]:
    named = [(f"w{i}", torch.full((4,), float(version * 10 + i))) for i in range(parts)]
    return [WeightBucket(version, [one], i == parts - 1, checksum([one])) for i, one in enumerate(named)]


def sender_to(folder):
    (folder / "config.json").write_text("{}")
    return DiskSender(DiskConfig(check_every=0), SenderPlace(folder / "engine_weights", folder))


@contextlib.contextmanager
def engine_over(tmp_path, *servers: FakeServer, wants_routes: bool = True, **settings):
    model = ServedModel(tmp_path, tmp_path, 320, LAYOUT, wants_routes)
    given = {"retry_wait_seconds": 0.01, "health_seconds": 0.2, **settings}
    cfg = SglangEngineConfig(urls=[server.url for server in servers], **given)
    engine = SglangEngine(cfg, served_model=model, sender=sender_to(tmp_path))
    try:
        yield engine
    finally:
        engine.close()


async def publish(engine: SglangEngine, version: int) -> None:
    await engine.pause()
    try:
        for bucket in buckets(version):
            await engine.update_weights(bucket)
    finally:
        await engine.resume()


async def answer(engine: SglangEngine, seed: int = 1, budget: int = 6):
    return await engine.generate(PROMPT, SamplingParams(budget, seed=seed), f"p/{seed}#0")


def assert_by(got, version: int | str, seed: int = 1) -> None:
    ids, _, routes = should_sample(PROMPT, len(got.token_ids), seed=seed, label=str(version))
    np.testing.assert_array_equal(got.token_ids, ids)
    np.testing.assert_array_equal(got.routed_experts.open(), routes)


def test_an_update_reaches_every_server_in_the_right_order(tmp_path):
    with FakeServer() as a, FakeServer() as b, engine_over(tmp_path, a, b, affinity_slack=0) as engine:

        async def main():
            before = await answer(engine)
            await publish(engine, 1)
            return before, await asyncio.gather(*(answer(engine, seed) for seed in range(1, 9)))

        before, after = asyncio.run(main())
        assert_by(before, "default")
        for seed, got in enumerate(after, 1):
            assert got.policy_version == 1
            assert_by(got, 1, seed)
        digests = {server.call(lambda app: app.state.digest.hexdigest()) for server in (a, b)}
        assert len(digests) == 1
        for server in (a, b):
            calls = [call for call in server.state()["calls"] if call != "/health"]
            assert calls == ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"]


@pytest.mark.parametrize("kind", ["refuse", "drop", "forget"])
def test_a_server_that_misses_an_update_serves_nothing_until_it_has_it(tmp_path, kind):
    """`forget`: it says success and keeps its label, as a server that takes unknown weights without a word."""
    with FakeServer() as a, FakeServer() as b, engine_over(tmp_path, a, b, affinity_slack=0) as engine:
        a.set_faults({"kind": kind, "endpoint": "/update_weights_from_disk"})

        async def main():
            await answer(engine)
            await publish(engine, 1)
            answers = await asyncio.gather(*(answer(engine, seed) for seed in range(1, 7)))
            await until(lambda: engine.counts()["returns"] == 1)
            return answers + await asyncio.gather(*(answer(engine, seed) for seed in range(1, 7)))

        for place, got in enumerate(asyncio.run(main())):
            assert_by(got, 1, place % 6 + 1)
        assert a.state()["label"] == b.state()["label"] == "1"
        assert engine.counts()["ejections"] == 1


def test_an_update_that_no_server_takes_leaves_the_old_weights_serving(tmp_path):
    with FakeServer() as server, engine_over(tmp_path, server, no_server_seconds=20.0) as engine:

        async def main():
            await publish(engine, 1)
            bad = replace(buckets(2)[0], checksum="0" * 64)
            with pytest.raises(WeightSyncError, match=r"checksum .* version 1 goes on serving"):
                await engine.update_weights(bad)
            with pytest.raises(WeightSyncError, match="w0 was sent twice"):
                await send_twice(engine)
            with pytest.raises(WeightSyncError, match="version 1 is already served; versions only rise"):
                await engine.update_weights(buckets(0)[0])
            return await answer(engine)

        async def send_twice(engine):
            for _ in range(2):
                await engine.update_weights(buckets(2)[0])

        got = asyncio.run(main())
        assert (got.policy_version, engine.policy_version) == (1, 1)
        assert_by(got, 1)
        assert sorted(path.name for path in (tmp_path / "engine_weights").iterdir()) == ["1"]


def test_a_crash_in_the_middle_of_an_update_ends_with_the_new_weights(tmp_path):
    """Pitfall 25: the server dies while it loads; it is brought back, gets the version of now, and serves."""
    cfg = FakeEngineConfig(update_seconds=0.2)
    with FakeServer(cfg) as a, FakeServer(cfg) as b, engine_over(tmp_path, a, b) as engine:

        async def main():
            await publish(engine, 1)
            crash = asyncio.get_running_loop().run_in_executor(None, crash_when_loading)
            await publish(engine, 2)
            await crash
            await until(lambda: engine.counts()["returns"] == 1)
            return await asyncio.gather(*(answer(engine, seed) for seed in range(1, 9)))

        def crash_when_loading():
            while a.state()["counts"].get("/update_weights_from_disk", 0) < 2:
                pass
            a.set_faults({"kind": "drop_after", "endpoint": "/update_weights_from_disk"})
            a.restart(0.1)

        a.set_faults({"kind": "drop_after", "endpoint": "/update_weights_from_disk", "after": 1})
        for seed, got in enumerate(asyncio.run(main()), 1):
            assert_by(got, 2, seed)
        assert a.state()["label"] == "2"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_held_by_a_server_that_failed_an_update_never_go_on_there(tmp_path, mode):
    """It comes back with a part of the weights; SGLang would let them go on, under the old label, before the replay."""
    with FakeServer(SLOW) as a, FakeServer(SLOW) as b, engine_over(tmp_path, a, b, pause_mode=mode) as engine:

        async def main():
            asked = [asyncio.create_task(answer(engine, seed, budget=60)) for seed in range(1, 5)]
            await until(lambda: all(server.call(lambda app: len(app.state.running)) == 2 for server in (a, b)))
            a.set_faults({"kind": "refuse", "endpoint": "/update_weights_from_disk"})
            await publish(engine, 1)
            a.call(lambda app: setattr(app.state, "label", "half"))  # what it samples from now on says so
            answers = await asyncio.gather(*asked)
            await until(lambda: engine.counts()["returns"] == 1)
            return answers

        for got in asyncio.run(main()):
            assert len(got.token_ids) == 60
            assert [version for _, _, version in got.version_spans] in ([0, 1], [1])
        assert a.state()["label"] == "1"
        assert not a.state()["running"]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_memory_is_released_after_an_abort_and_taken_weights_first(tmp_path, mode):
    """Pitfall 17: whatever an update does to requests that run, those whose memory goes are ended."""
    cfg = replace(SLOW, memory_saver=True)
    with FakeServer(cfg) as server, engine_over(tmp_path, server, pause_mode=mode, release_memory=True) as engine:

        async def main():
            running = asyncio.create_task(answer(engine, budget=150))
            await until(lambda: server.call(lambda app: len(app.state.running)) == 1)
            await engine.set_memory(released=True)
            assert server.state()["released"] == ["kv_cache", "weights"]
            assert (server.state()["paused"], server.state()["running"]) == ("abort", [])
            with pytest.raises(RolloutError, match="memory is released; take it again first"):
                await answer(engine)
            await engine.set_memory(released=False)
            assert server.state()["released"] == ["kv_cache"]
            await publish(engine, 1)
            return await running

        got = asyncio.run(main())
        assert len(got.token_ids) == 150
        assert [version for _, _, version in got.version_spans] in ([0, 1], [1])
        calls = [call.strip("/") for call in server.state()["calls"] if call != "/health"]
        wanted = ["release_memory_occupation", "resume_memory_occupation", "update_weights_from_disk"]
        places = [calls.index(call) for call in wanted]
        assert places == sorted(places)
        last = ["resume_memory_occupation", "update_weight_version", "flush_cache", "continue_generation"]
        assert calls[-4:] == last
        assert server.state()["num_restarts"] == 0, "it died of a call that came too early"


def test_every_rank_of_a_server_is_asked_and_named(tmp_path):
    """Pitfall 22: how many there are, the server says."""
    cfg = replace(SLOW, data_size=4)
    with FakeServer(cfg) as server, engine_over(tmp_path, server, affinity_slack=0) as engine:

        async def main():
            asked = [asyncio.create_task(answer(engine, seed, budget=30)) for seed in range(8)]
            await until(lambda: server.call(lambda app: len(app.state.running)) == 8)
            ranks = server.call(lambda app: [one.body.get("routed_dp_rank") for one in app.state.running.values()])
            await asyncio.gather(*asked)
            return Counter(ranks)

        assert asyncio.run(main()) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_label_of_another_run_is_replaced(tmp_path):
    with FakeServer(FakeEngineConfig(weight_version="7")) as server, engine_over(tmp_path, server) as engine:
        got = asyncio.run(answer(engine))
        assert got.version_spans == ((0, 6, 0),)
        assert server.state()["label"].startswith("start-")


def test_a_server_without_routes_is_refused_where_they_are_needed(tmp_path):
    with FakeServer(FakeEngineConfig(returns_routes=False)) as server:
        with (
            engine_over(tmp_path, server) as engine,
            pytest.raises(RolloutError, match=r"without --enable-return-routed"),
        ):
            asyncio.run(answer(engine))
        with engine_over(tmp_path, server, wants_routes=False) as engine:
            assert asyncio.run(answer(engine)).routed_experts is None


def test_a_server_without_room_for_the_longest_answer_is_refused(tmp_path):
    with FakeServer(FakeEngineConfig(context_length=12)) as server:
        model = ServedModel(tmp_path, tmp_path, 320, LAYOUT, wants_routes=True, longest_tokens=13)
        engine = SglangEngine(SglangEngineConfig(urls=[server.url]), served_model=model, sender=sender_to(tmp_path))
        words = r"holds 12 tokens of prompt and answer, but .*rollout.max_new_tokens is 13; lower them, or start it"
        with pytest.raises(RolloutError, match=words):
            asyncio.run(answer(engine))
        engine.close()


def test_no_more_is_asked_for_than_the_smallest_server_has_room_for(tmp_path):
    """BUGS 28."""
    cfg = FakeEngineConfig(context_length=12)
    with FakeServer() as large, FakeServer(cfg) as small, engine_over(tmp_path, large, small) as engine:
        assert len(asyncio.run(answer(engine, budget=9)).token_ids) == 12 - len(PROMPT)
        full = engine.generate(prompt_of(12), SamplingParams(1), "q#0")
        with pytest.raises(RolloutError, match="leaves no room in a context of 12; nothing was asked"):
            asyncio.run(full)


def test_a_server_that_could_release_nothing_is_refused(tmp_path):
    with (
        FakeServer() as server,
        engine_over(tmp_path, server, release_memory=True) as engine,
        pytest.raises(RolloutError, match=r"without --enable-memory-saver, so rollout.engine.release_memory"),
    ):
        asyncio.run(answer(engine))


def test_an_engine_needs_urls_or_servers(tmp_path):
    model = ServedModel(tmp_path, tmp_path, 320, LAYOUT, wants_routes=True)
    with pytest.raises(ConfigError, match=r"needs either urls, of servers that run, .* it has neither"):
        SglangEngine(SglangEngineConfig(), served_model=model, sender=sender_to(tmp_path))
    with pytest.raises(ConfigError, match="it has both"):
        SglangEngine(SglangEngineConfig(urls=["http://a"], servers={}), served_model=model, sender=sender_to(tmp_path))
    with pytest.raises(ConfigError, match="pause_mode is 'stop', but must be one of abort, retract, in_place"):
        SglangEngineConfig(pause_mode="stop")


def test_requests_that_wait_out_an_update_have_the_time_for_it():
    """Each limit of an update is shorter than that of a request, where requests stay at the server meanwhile."""
    limits = {"control_timeout_seconds": 120.0, "update_timeout_seconds": 600.0}
    SglangEngineConfig(pause_mode="abort", request_timeout_seconds=1.0, **limits)
    for mode in ("retract", "in_place"):
        SglangEngineConfig(pause_mode=mode, request_timeout_seconds=721.0, **limits)
        with pytest.raises(ConfigError, match=r"request_timeout_seconds is 720, .* must be above .* which is 720"):
            SglangEngineConfig(pause_mode=mode, request_timeout_seconds=720.0, **limits)
    with pytest.raises(ConfigError, match="update_timeout_seconds is 0, but must be above 0"):
        SglangEngineConfig(update_timeout_seconds=0)
