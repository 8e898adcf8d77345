"""The fake server refuses, waits, and dies where SGLang 0.5.23 does by its source, so that no misuse passes here."""

from __future__ import annotations

import asyncio
import base64
import contextlib

import pytest
from fake_servers import SLOW, until, wire_request

from moerl.errors import MoerlError, RolloutError, WeightSyncError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.wire import payload

ENDLESS = FakeEngineConfig(token_seconds=1000.0, max_running_requests=1)
"""What runs there ends by being aborted."""
PART = base64.b64encode(b"tensors").decode()


def request(name: str):
    return payload(wire_request()) | {"rid": name}


def talk(cfg: FakeEngineConfig, story):
    """Run `story(client, server, start)`; `start(name)` asks for a completion and returns once the server has it."""

    async def main(server):
        client, tasks = SglangClient(server.url), []

        async def start(name):
            tasks.append(asyncio.create_task(client.generate(request(name))))
            await until(lambda: name in server.state()["running"])
            return tasks[-1]

        try:
            return await story(client, server, start)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()

    with FakeServer(cfg) as server:
        return asyncio.run(main(server))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return str(tmp_path)


@pytest.mark.parametrize(("mode", "is_refused"), [("", True), ("in_place", True), ("retract", False), ("abort", False)])
def test_a_flush_is_refused_while_a_request_runs(mode, is_refused):
    async def story(client, _, start):
        await start("a")
        if mode:
            await client.pause(mode)
        await client.flush_cache(max_attempts=1)

    if not is_refused:
        talk(ENDLESS, story)
        return
    with pytest.raises(RolloutError, match=r"/flush_cache.* 400: Flush cache failed"):
        talk(ENDLESS, story)


def test_a_flush_is_refused_while_a_request_waits():
    async def story(client, server, start):
        first = await start("a")
        await start("b")
        await client.abort("a")
        await first
        server.call(lambda app: setattr(app.state.running["b"], "is_admitted", False))
        await client.flush_cache(max_attempts=1)

    with pytest.raises(RolloutError, match="Flush cache failed"):
        talk(ENDLESS, story)


@pytest.mark.parametrize("kind", ["disk", "tensor"])
def test_an_update_that_shall_flush_and_cannot_is_no_success(kind, folder):
    async def story(client, _, start):
        await start("a")
        await client.pause("in_place")
        if kind == "disk":
            await client.update_from_disk(folder, weight_version=1)
        else:
            await client.begin_update()
            await client.update_from_tensor([PART], weight_version=1, flush_cache=True)

    with pytest.raises(WeightSyncError, match="Weights were updated, but the cache was not flushed"):
        talk(ENDLESS, story)


def test_an_update_of_a_server_that_is_not_paused_waits_for_what_runs(folder):
    async def story(client, server, start):
        await start("a")
        update = asyncio.create_task(client.update_from_disk(folder, weight_version=1))
        await until(lambda: server.state()["counts"].get("/update_weights_from_disk"))
        assert server.state()["label"] == "default"
        await client.abort("a")
        await update
        assert server.state()["label"] == "1"
        assert server.state()["running"] == []

    talk(ENDLESS, story)


def test_what_is_held_in_place_is_aborted_when_it_goes_on():
    async def story(client, server, start):
        held = await start("a")
        await client.pause("in_place")
        await client.abort_all()
        assert server.state()["running"] == ["a"]
        await client.continue_generation()
        return (await held)["meta_info"]["finish_reason"]["type"]

    assert talk(ENDLESS, story) == "abort"


def test_a_pause_by_abort_over_one_in_place_locks_the_server_up():
    """Its requests need a step to end, and what would let them have it waits for the pause."""

    async def story(client, server, start):
        await start("a")
        await client.pause("in_place")
        again = asyncio.create_task(client.pause("abort"))
        await until(lambda: server.state()["counts"]["/pause_generation"] == 2)
        goes_on = asyncio.create_task(client.continue_generation())
        await until(lambda: server.state()["counts"].get("/continue_generation"))
        assert server.state()["paused"] == "abort"
        assert server.state()["running"] == ["a"]
        for task in (again, goes_on):
            assert not task.done()
            task.cancel()
        await asyncio.gather(again, goes_on, return_exceptions=True)
        assert server.state()["paused"] == "abort"

    talk(ENDLESS, story)


TOUCHES = {
    "/generate": lambda client, _: client.generate(request("a")),
    "/update_weights_from_disk": lambda client, folder: client.update_from_disk(folder),
    "/weights_checker": lambda client, _: client.checksum(),
    "/health": lambda client, _: client.check_health(),
}
"""What computes, and what reads or writes weights."""
FATAL = [
    *(("kv_cache", endpoint) for endpoint in ("/generate", "/health")),
    *(("weights", endpoint) for endpoint in TOUCHES),
]


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
@pytest.mark.parametrize("endpoint", TOUCHES)
def test_what_reaches_for_released_memory_kills_the_server(tag, endpoint, folder):
    async def story(client, server, _):
        await client.release_memory([tag])
        with contextlib.suppress(MoerlError):  # a health check is asked again, and finds the new process
            await TOUCHES[endpoint](client, folder)
        return server.state()["num_restarts"]

    assert talk(FakeEngineConfig(memory_saver=True), story) == ((tag, endpoint) in FATAL)


def test_memory_is_not_released_while_a_request_runs():
    async def story(client, server, start):
        await start("a")
        with pytest.raises(MoerlError, match="no whole answer"):
            await client.release_memory(["weights"])
        return server.state()["num_restarts"]

    assert talk(ENDLESS, story) == 1


def test_a_bucket_without_a_part_for_every_rank_kills_the_server():
    async def story(client, server, _):
        await client.begin_update()
        await client.update_from_tensor([PART, PART, PART])  # one too many is not looked at
        with pytest.raises(MoerlError, match="no whole answer"):
            await client.update_from_tensor([PART])
        return server.state()["num_restarts"]

    assert talk(FakeEngineConfig(tensor_size=2), story) == 1


def test_a_group_that_is_not_there_is_said():
    async def story(client, _, __):
        await client.begin_update()
        with pytest.raises(WeightSyncError, match="Failed to receive weights"):
            await client.update_from_distributed([("w", "float32", (1,))], group_name="g")
        with pytest.raises(WeightSyncError, match="The group to be destroyed does not exist"):
            await client.destroy_group("g")

    talk(SLOW, story)
