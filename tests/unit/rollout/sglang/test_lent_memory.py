"""Servers that lend their memory while they die, come back, or are out: none is asked for what it did not lend."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
import torch
from fake_servers import LAYOUT, prompt_of, should_sample, until

from moerl.checksums import checksum
from moerl.errors import MoerlError, RolloutError
from moerl.rollout.engine import ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang import lending
from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.restarts import Restarts
from moerl.types import SamplingParams, WeightBucket
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender
from moerl.weight_sync.transports.tensor import TensorConfig, TensorSender

LENDS = FakeEngineConfig(memory_saver=True)
PROMPT = prompt_of(5)
SENDERS = {
    "disk": lambda place: DiskSender(DiskConfig(check_every=0), place),
    "tensor": lambda place: TensorSender(TensorConfig(check_every=0), place),
}


class Launched:
    """Stands for `SglangServers` over fake ones: starts those anew that it holds for dead."""

    def __init__(self, *servers: FakeServer) -> None:
        self.servers = servers
        self.dead_now: dict[int, str] = {}
        self.started: list[int] = []

    def dead(self) -> dict[int, str]:
        return dict(self.dead_now)

    def restart(self, index: int) -> None:
        self.servers[index].restart()
        self.dead_now.pop(index, None)
        self.started.append(index)


@contextlib.contextmanager
def engine_over(tmp_path, *servers: FakeServer, transport: str, launched: Launched | None = None):
    (tmp_path / "config.json").write_text("{}")
    model = ServedModel(tmp_path, tmp_path, 320, LAYOUT, wants_routes=False)
    cfg = SglangEngineConfig(
        urls=[server.url for server in servers], retry_wait_seconds=0.01, health_seconds=0.2, affinity_slack=0
    )
    sender = SENDERS[transport](SenderPlace(tmp_path / "engine_weights", tmp_path))
    engine = SglangEngine(cfg, served_model=model, sender=sender)
    if launched is not None:
        engine._restarts = Restarts(launched, lambda: engine._updates is not None and engine._updates.is_released)  # pyright: ignore[reportArgumentType]
    try:
        yield engine
    finally:
        engine.close()


async def publish(engine: SglangEngine, version: int) -> None:
    named = [(f"w{i}", torch.full((4,), float(version * 10 + i))) for i in range(2)]
    await engine.pause()
    try:
        for i, one in enumerate(named):
            await engine.update_weights(WeightBucket(version, [one], i == 1, checksum([one])))
    finally:
        await engine.resume()


async def answer(engine: SglangEngine, seed: int = 1):
    return await engine.generate(PROMPT, SamplingParams(6, seed=seed), f"p/{seed}#0")


async def assert_all_serve(engine: SglangEngine, version: int, *servers: FakeServer) -> None:
    await until(lambda: len(engine._dispatcher.pool.fit) == len(servers))
    for seed in range(1, 9):
        got = await answer(engine, seed)
        ids, _, _ = should_sample(PROMPT, 6, seed=seed, label=str(version))
        np.testing.assert_array_equal(got.token_ids, ids)
    for server in servers:
        assert server.state()["label"] == str(version)
        assert server.state()["released"] == []


@pytest.mark.parametrize("transport", SENDERS)
def test_a_server_that_was_started_anew_meanwhile_is_asked_for_nothing(tmp_path, transport):
    """SGLang's scheduler has a KeyError, and dies, where it is to resume what was never released there."""
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b, engine_over(tmp_path, a, b, transport=transport) as engine:

        async def main():
            await answer(engine)
            await engine.set_memory(released=True)
            b.restart()
            await engine.set_memory(released=False)
            await publish(engine, 1)
            await assert_all_serve(engine, 1, a, b)

        asyncio.run(main())
        assert engine.counts()["ejections"] == 0
        assert [server.state()["num_restarts"] for server in (a, b)] == [0, 1]


@pytest.mark.parametrize("transport", SENDERS)
def test_a_server_that_dies_of_taking_its_memory_gets_the_update_and_is_not_asked_again(tmp_path, transport):
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b, engine_over(tmp_path, a, b, transport=transport) as engine:

        async def main():
            await publish(engine, 1)
            await engine.set_memory(released=True)
            b.set_faults({"kind": "restart", "endpoint": "/resume_memory_occupation", "seconds": 0.0})
            await engine.set_memory(released=False)
            await publish(engine, 2)
            await publish(engine, 3)  # without a copy of version 2 it came with this one
            await assert_all_serve(engine, 3, a, b)

        asyncio.run(main())
        assert [server.state()["num_restarts"] for server in (a, b)] == [0, 1]


@pytest.mark.parametrize("transport", SENDERS)
def test_a_server_that_is_out_lends_too_and_takes_its_memory_before_anything_runs_there(tmp_path, transport):
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b, engine_over(tmp_path, a, b, transport=transport) as engine:

        async def main():
            await publish(engine, 1)
            b.set_faults({"kind": "status", "endpoint": "/health", "status": 503, "times": -1})
            await until(lambda: engine.counts()["ejections"] == 1)
            await engine.set_memory(released=True)
            assert b.state()["released"] == ["kv_cache", "weights"]
            b.set_faults()
            await engine.set_memory(released=False)
            await publish(engine, 2)
            await publish(engine, 3)
            await assert_all_serve(engine, 3, a, b)

        asyncio.run(main())
        assert [server.state()["num_restarts"] for server in (a, b)] == [0, 0]


@pytest.mark.parametrize("slow", ["/continue_generation", "/health"])
def test_a_server_that_is_asked_to_come_back_lends_its_memory_after_that(tmp_path, slow):
    """The watch would let it go on and ask for a token after its weights were released, of which SGLang dies."""
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b, engine_over(tmp_path, a, b, transport="disk") as engine:

        async def main():
            await publish(engine, 1)
            b.set_faults({"kind": "slow", "endpoint": slow, "seconds": 0.5, "times": -1})
            asked = b.state()["counts"].get(slow, 0)
            pool = engine._dispatcher.pool
            engine._loop.call_soon_threadsafe(pool.eject, pool.members[1], "the test")
            await until(lambda: b.state()["counts"].get(slow, 0) > asked and pool.members[1].state == "out")
            await engine.set_memory(released=True)
            assert b.state()["released"] == ["kv_cache", "weights"]
            await asyncio.sleep(1.0)
            assert b.state()["released"] == ["kv_cache", "weights"]
            assert b.state()["num_restarts"] == 0
            b.set_faults()
            await engine.set_memory(released=False)
            await publish(engine, 2)
            await assert_all_serve(engine, 2, a, b)

        asyncio.run(main())
        assert [server.state()["num_restarts"] for server in (a, b)] == [0, 0]


def test_memory_is_released_and_taken_no_more_than_once(tmp_path):
    with FakeServer(LENDS) as server, engine_over(tmp_path, server, transport="disk") as engine:

        async def main():
            await publish(engine, 1)
            await engine.set_memory(released=False)
            for released in (True, True, False, False, True, False):
                await engine.set_memory(released=released)
            await publish(engine, 2)
            await assert_all_serve(engine, 2, server)

        asyncio.run(main())
        assert server.state()["num_restarts"] == 0


async def lent(engine: SglangEngine, server: FakeServer) -> None:
    await engine.set_memory(released=True)


async def without_weights(engine: SglangEngine, server: FakeServer) -> None:
    await lent(engine, server)
    await engine.set_memory(released=False)


async def without_cache(engine: SglangEngine, server: FakeServer) -> None:
    """The weights have come, and the call that takes the cache's memory is on its way."""
    await without_weights(engine, server)
    server.set_faults({"kind": "hang", "endpoint": "/resume_memory_occupation", "times": -1})
    asked = server.state()["counts"]["/resume_memory_occupation"]
    task = asyncio.create_task(publish(engine, 2))
    await until(lambda: server.state()["counts"]["/resume_memory_occupation"] > asked)
    task.cancel()
    await asyncio.wait({task})
    server.set_faults()


@pytest.mark.parametrize("transport", SENDERS)
@pytest.mark.parametrize("stage", [lent, without_weights, without_cache])
def test_a_run_on_servers_that_lend_to_a_run_that_ended_is_refused(tmp_path, stage, transport):
    """Before, their label went for that of a start, or of another run, and they died of the first token."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    with FakeServer() as first, FakeServer(LENDS) as server:
        with engine_over(tmp_path / "old", server, transport=transport) as engine:

            async def until_it_ends():
                await publish(engine, 1)
                await stage(engine, server)

            asyncio.run(until_it_ends())
            if stage is not without_cache:  # of which it is not known whether it came: nothing is asked there
                engine._updates = None  # as one that was killed
        assert server.state()["released"]
        asked = server.state()["calls"]
        words = f"server {server.url} still lends its memory to a run that ended .*: restart that server"
        with engine_over(tmp_path / "new", first, server, transport=transport) as engine:
            with pytest.raises(RolloutError, match=words):
                asyncio.run(publish(engine, 1))
            assert server.state()["calls"] == asked
            assert server.state()["num_restarts"] == 0
            server.restart()

            async def goes_on():
                await publish(engine, 1)
                await assert_all_serve(engine, 1, first, server)

            asyncio.run(goes_on())


@pytest.mark.parametrize("transport", SENDERS)
@pytest.mark.parametrize("stage", [lent, without_weights])
def test_a_run_that_ends_while_servers_lend_gives_their_memory_back(tmp_path, stage, transport):
    """As where the learner fails in the midst of a step. Their weights are lost: the next run publishes first."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b:
        with engine_over(tmp_path / "old", a, b, transport=transport) as engine:

            async def until_it_ends():
                await publish(engine, 1)
                await stage(engine, a)

            asyncio.run(until_it_ends())
        for server in (a, b):
            assert server.state()["released"] == []
            assert server.state()["num_restarts"] == 0
            assert server.state()["label"].startswith("empty-")
            assert server.state()["paused"]
        with engine_over(tmp_path / "new", a, b, transport=transport) as engine:

            async def goes_on():
                await engine._start()
                assert engine._dispatcher is not None
                assert engine._dispatcher.expected.labels == {}  # what they would sample is of no policy
                await publish(engine, 1)
                await assert_all_serve(engine, 1, a, b)

            asyncio.run(goes_on())
        assert [server.state()["num_restarts"] for server in (a, b)] == [0, 0]


def test_a_run_that_ends_asks_a_server_that_was_started_anew_for_nothing(tmp_path):
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b:
        with engine_over(tmp_path, a, b, transport="disk") as engine:

            async def until_it_ends():
                await publish(engine, 1)
                await engine.set_memory(released=True)
                b.restart()

            asyncio.run(until_it_ends())
        assert [server.state()["num_restarts"] for server in (a, b)] == [0, 1]
        assert a.state()["label"].startswith("empty-")
        assert b.state()["label"] == "default"


@pytest.mark.parametrize("kind", ["hang", "drop"])
def test_a_run_ends_though_a_server_does_not_take_its_memory(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(lending, "GIVE_BACK_SECONDS", 2.0)
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b:

        def fails():
            with engine_over(tmp_path, a, b, transport="disk") as engine:

                async def until_it_ends():
                    await publish(engine, 1)
                    await engine.set_memory(released=True)

                asyncio.run(until_it_ends())
                b.set_faults({"kind": kind, "endpoint": "/resume_memory_occupation", "times": -1})
                raise ZeroDivisionError  # what ended the run is what is told

        with pytest.raises(ZeroDivisionError):
            fails()
        assert b.state()["counts"]["/resume_memory_occupation"] == 1
        assert a.state()["released"] == []
        assert b.state()["label"].startswith("lent-")


@pytest.mark.parametrize("transport", SENDERS)
def test_a_server_that_was_started_anew_before_the_update_is_asked_for_nothing(tmp_path, transport):
    """Before, the update put the lending's label on it, it was asked for a cache that it had, and died of that."""
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b, engine_over(tmp_path, a, b, transport=transport) as engine:

        async def main():
            await publish(engine, 1)
            await without_weights(engine, b)
            b.restart()
            await publish(engine, 2)
            await assert_all_serve(engine, 2, a, b)

        asyncio.run(main())
        assert engine.counts()["ejections"] == 0
        assert [server.state()["num_restarts"] for server in (a, b)] == [0, 1]


def test_no_server_is_started_while_memory_is_released(tmp_path):
    """It would take the memory that the learner works in."""
    with FakeServer(LENDS) as a, FakeServer(LENDS) as b:
        launched = Launched(a, b)
        with engine_over(tmp_path, a, b, transport="disk", launched=launched) as engine:

            async def main():
                await publish(engine, 1)
                await engine.set_memory(released=True)
                launched.dead_now[1] = "it was killed"
                await engine._revive(1, False)
                await engine._revive(0, True)
                assert launched.started == []
                await engine.set_memory(released=False)
                await engine._revive(1, False)
                await publish(engine, 2)
                await assert_all_serve(engine, 2, a, b)

            asyncio.run(main())
        assert launched.started == [1]
        assert [server.state()["num_restarts"] for server in (a, b)] == [0, 1]


@pytest.mark.parametrize("label", ["0", "default"])
def test_a_server_that_was_started_anew_gets_the_weights_of_version_0_again(tmp_path, label):
    """The folder that it starts with has others where the run began with random weights, or was taken up again."""
    with FakeServer(FakeEngineConfig(weight_version=label)) as server:
        launched = Launched(server)
        with engine_over(tmp_path, server, transport="disk", launched=launched) as engine:

            async def main():
                await publish(engine, 0)
                published = server.call(lambda app: app.state.digest.hexdigest())
                launched.dead_now[0] = "it was killed"
                server.set_faults({"kind": "drop"})
                await answer(engine)
                assert server.call(lambda app: app.state.digest.hexdigest()) == published
                assert server.call(lambda app: app.state.model_path) == str(tmp_path / "engine_weights" / "0")

            asyncio.run(main())
        assert launched.started == [0]


@pytest.mark.parametrize("endpoint", ["/release_memory_occupation", "/resume_memory_occupation"])
def test_the_fake_dies_of_what_sglang_dies_of(endpoint):
    async def ask(url):
        client = SglangClient(url)
        try:
            if endpoint.startswith("/release"):
                await client.release_memory(["weights"])
                await client.release_memory(["weights"])
            else:
                await client.release_memory(["weights"])
                await client.resume_memory(["weights", "kv_cache"])
        finally:
            await client.close()

    with FakeServer(LENDS) as server:
        with pytest.raises(MoerlError, match=f"{endpoint}.* no whole answer"):
            asyncio.run(ask(server.url))
        assert server.state()["num_restarts"] == 1
