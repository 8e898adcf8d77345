"""Updates in which every server is lost: they cost time, and no old, mixed or unknown weights are served as new."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
import torch
from fake_servers import dispatching, prompt_of, until

from moerl.errors import RolloutError, WeightSyncError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.updates import Updates
from moerl.types import SamplingParams
from moerl.weight_sync.buckets import make_buckets
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender
from moerl.weight_sync.transports.tensor import TensorConfig, TensorSender

WEIGHTS = {f"layer.{i}.weight": torch.full((4, 4), float(i)) for i in range(5)}
NUM_BUCKETS = 3
LOAD, BUCKET = "/update_weights_from_disk", "/update_weights_from_tensor"
PAUSE, FLUSH, CONTINUE, END = "/pause_generation", "/flush_cache", "/continue_generation", "/end_weight_update"
SENDERS = {
    "disk": lambda place: DiskSender(DiskConfig(check_every=0), place),
    "tensor": lambda place: TensorSender(TensorConfig(check_every=0), place),
    "kept": lambda place: TensorSender(TensorConfig(check_every=0, keep_copy=True), place),
}
KEPT = ["disk", "kept"]


@pytest.fixture
def place(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "float32"}))
    return SenderPlace(tmp_path / "weights", model)


@contextlib.asynccontextmanager
async def updating(servers, kind, place, *, wait_seconds=0.0):
    """(dispatcher, updates) as the engine puts them together, with a watch."""
    box, sender = [], SENDERS[kind](place)

    async def replay(client):
        return await box[0].replay(client)

    async with dispatching(servers, watch=True, replay=replay) as dispatcher:
        box.append(Updates(dispatcher, sender, pause_mode="abort", wait_seconds=wait_seconds))
        yield dispatcher, box[0]
        sender.close()


async def publish(updates, version):
    """As `Publisher`: pause, buckets, resume whatever happens."""
    await updates.pause()
    try:
        for bucket in make_buckets(WEIGHTS.items(), version=version, bucket_bytes=128, is_summed=False):
            await updates.take(bucket)
    finally:
        await updates.resume()


async def assert_serves(dispatcher, version, *servers):
    """Every one of `servers` comes back, and what it has and answers is of `version`."""
    await until(lambda: len(dispatcher.pool.fit) == len(servers))
    for i in range(8):
        got = await asyncio.wait_for(
            dispatcher.generate(prompt_of(5), SamplingParams(3, seed=1), f"p{version}-{i}#0"), 20
        )
        assert got.version_spans == ((0, 3, version),)
    assert {server.state()["label"] for server in servers} == {str(version)}


STRIKES = [
    *(("disk", endpoint, 0) for endpoint in (PAUSE, LOAD, FLUSH, CONTINUE)),
    *(("kept", endpoint, 0) for endpoint in (PAUSE, "/begin_weight_update", BUCKET, END, FLUSH, CONTINUE)),
    *(("kept", BUCKET, after) for after in range(1, NUM_BUCKETS)),
]


@pytest.mark.parametrize("fault", ["status", "drop", "drop_after", "restart"])
@pytest.mark.parametrize(("kind", "endpoint", "after"), STRIKES)
def test_the_only_server_may_die_anywhere_in_an_update_whose_weights_are_kept(kind, endpoint, after, fault, place):
    rule = {"kind": fault, "endpoint": endpoint, "after": after, "seconds": 0.1}
    with FakeServer() as server:

        async def main():
            async with updating([server], kind, place) as (dispatcher, updates):
                await publish(updates, 1)
                server.set_faults(rule)
                await publish(updates, 2)
                assert server.call(lambda app: [one.hits for one in app.state.rules]) == [1], "the fault struck"
                assert dispatcher.policy_version == 2
                await assert_serves(dispatcher, 2, server)
                await publish(updates, 3)
                await assert_serves(dispatcher, 3, server)

        asyncio.run(main())


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("is_seen", [True, False])
def test_servers_that_are_dead_before_an_update_get_it_when_they_come_back(kind, is_seen, place):
    """Before, it was an error where no health check had found their death yet."""
    with FakeServer() as one, FakeServer() as other:

        async def main():
            async with updating([one, other], kind, place) as (dispatcher, updates):
                await publish(updates, 1)
                for server in (one, other):
                    server.restart(1e9)
                if is_seen:
                    await until(lambda: not dispatcher.pool.fit)
                await publish(updates, 2)
                assert dispatcher.pool.fit == []
                for server in (one, other):
                    server.restart()
                await assert_serves(dispatcher, 2, one, other)

        asyncio.run(main())


@pytest.mark.parametrize("kind", KEPT)
def test_of_two_servers_that_fail_one_that_refuses_makes_it_an_error(kind, place):
    endpoint = LOAD if kind == "disk" else END
    with FakeServer() as dies, FakeServer() as refuses:

        async def main():
            async with updating([dies, refuses], kind, place) as (dispatcher, updates):
                await publish(updates, 1)
                dies.set_faults({"kind": "restart", "endpoint": endpoint, "seconds": 0.0})
                refuses.set_faults({"kind": "refuse", "endpoint": endpoint})
                words = "update to version 2 failed .no server took the update: .*a refusal that was asked for"
                with pytest.raises(WeightSyncError, match=words):
                    await publish(updates, 2)
                assert dispatcher.policy_version == 1
                await publish(updates, 2)
                await assert_serves(dispatcher, 2, dies, refuses)

        asyncio.run(main())


def test_a_server_that_refuses_to_pause_is_an_error(place):
    with FakeServer() as server:

        async def main():
            async with updating([server], "disk", place) as (_, updates):
                server.set_faults({"kind": "status", "status": 400, "endpoint": PAUSE})
                with pytest.raises(RolloutError, match=r"no server is left to pause: .*400"):
                    await updates.pause()

        asyncio.run(main())


def test_an_update_that_nobody_keeps_waits_for_a_server_to_send_it_to(place):
    with FakeServer() as server:

        async def main():
            async with updating([server], "tensor", place, wait_seconds=60.0) as (dispatcher, updates):
                await publish(updates, 1)
                server.restart(1e9)  # unseen until the pause
                update = asyncio.create_task(publish(updates, 2))
                await until(lambda: not dispatcher.pool.fit)
                done, _ = await asyncio.wait({update}, timeout=0.3)
                assert not done
                server.restart()
                await asyncio.wait_for(update, 20)
                await assert_serves(dispatcher, 2, server)

        asyncio.run(main())


def test_the_wait_for_a_server_ends(place):
    with FakeServer() as server:

        async def main():
            async with updating([server], "tensor", place, wait_seconds=0.2) as (dispatcher, updates):
                server.restart(1e9)
                words = r"no server is fit to take it after 0.2 s: server 0 .*no server serves"
                with pytest.raises(WeightSyncError, match=words):
                    await publish(updates, 1)
                assert dispatcher.policy_version == 0

        asyncio.run(main())


@pytest.mark.parametrize("endpoint", [BUCKET, END, FLUSH, CONTINUE])
def test_weights_that_nobody_has_any_more_are_an_error_that_says_what_keeps_them(endpoint, place):
    """Servers that come back would wait for them for ever."""
    with FakeServer() as server:

        async def main():
            async with updating([server], "tensor", place) as (dispatcher, updates):
                await publish(updates, 1)
                server.set_faults({"kind": "restart", "endpoint": endpoint, "seconds": 0.0})
                words = "nobody keeps these weights .*set weight_sync.transport.keep_copy=true"
                with pytest.raises((WeightSyncError, RolloutError), match=words):
                    await publish(updates, 2)
                await asyncio.sleep(0.3)
                assert dispatcher.pool.fit == [], "it has the weights of its start"
                await publish(updates, 3)
                await assert_serves(dispatcher, 3, server)

        asyncio.run(main())


def test_what_is_open_from_before_is_closed_when_a_server_is_recalled(place):
    """It may be a new process, which is in no group of weight updates."""
    with FakeServer() as server:

        async def main():
            async with updating([server], "tensor", place) as (dispatcher, updates):
                asked, sender = [], updates._sender
                give_up, send = sender.give_up, sender.send

                async def noted_give_up(clients):
                    asked.append("give up")
                    await give_up(clients)

                async def noted_send(bucket, clients):
                    asked.append("send")
                    return await send(bucket, clients)

                sender.give_up, sender.send = noted_give_up, noted_send
                await publish(updates, 1)
                assert asked == ["send"] * NUM_BUCKETS
                dispatcher.eject(dispatcher.pool.members[0], "the test")
                server.restart()
                await publish(updates, 2)
                assert asked[NUM_BUCKETS:] == ["give up", *["send"] * NUM_BUCKETS]
                await assert_serves(dispatcher, 2, server)

        asyncio.run(main())


@pytest.mark.parametrize("kind", ["disk", "tensor"])
@pytest.mark.parametrize("endpoint", [PAUSE, FLUSH, "/release_memory_occupation", "/resume_memory_occupation"])
def test_the_only_server_may_die_while_its_memory_is_lent(kind, endpoint, place):
    with FakeServer(FakeEngineConfig(memory_saver=True)) as server:

        async def main():
            async with updating([server], kind, place, wait_seconds=60.0) as (dispatcher, updates):
                await publish(updates, 1)
                server.set_faults({"kind": "restart", "endpoint": endpoint, "seconds": 0.0})
                await updates.release_memory()
                await updates.release_rest()
                await updates.take_memory()
                assert server.call(lambda app: [one.hits for one in app.state.rules]) == [1], "the fault struck"
                await publish(updates, 2)
                await assert_serves(dispatcher, 2, server)
                assert server.state()["released"] == []

        asyncio.run(main())
