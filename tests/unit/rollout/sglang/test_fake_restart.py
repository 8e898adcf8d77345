"""A fake server that is restarted is as one that died: nothing that was asked before is answered by the new process."""

from __future__ import annotations

import asyncio

import pytest
from fake_servers import SLOW, until, wire_request

from moerl.errors import MoerlError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.wire import payload


def restarted_under(server, ask, is_there, *, before=None):
    """What `ask` raises where the server dies once `is_there` says that the call has come."""

    async def main():
        client = SglangClient(server.url)
        try:
            if before is not None:
                await before(client)
            task = asyncio.create_task(ask(client))
            await until(is_there)
            server.restart()
            await asyncio.wait_for(task, 20)
        finally:
            await client.close()

    with pytest.raises(MoerlError, match="no whole answer") as caught:
        asyncio.run(main())
    return caught.value


def count(server, endpoint):
    return server.state()["counts"].get(endpoint, 0)


def test_a_load_that_was_under_way_is_not_applied_to_the_new_process(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with FakeServer(FakeEngineConfig(update_seconds=0.3)) as server:
        load = "/update_weights_from_disk"
        restarted_under(
            server,
            lambda client: client.update_from_disk(str(tmp_path), weight_version=1),
            lambda: count(server, load),
        )
        asyncio.run(asyncio.sleep(0.5))
        assert server.state()["label"] == "default"
        assert server.call(lambda app: app.state.model_path) == "fake"


def test_a_pause_that_waits_for_what_runs_is_not_answered():
    with FakeServer() as server:
        hold = {"kind": "slow", "endpoint": "/pause_generation", "seconds": 5.0}
        server.set_faults(hold)
        restarted_under(server, lambda client: client.pause("abort"), lambda: count(server, "/pause_generation"))


def test_a_request_that_waits_behind_a_pause_is_not_served_by_the_new_process():
    with FakeServer(SLOW) as server:
        restarted_under(
            server,
            lambda client: client.generate(payload(wire_request())),
            lambda: count(server, "/generate"),
            before=lambda client: client.pause("retract"),
        )
        assert server.state()["running"] == []
        assert server.state()["num_restarts"] == 1
