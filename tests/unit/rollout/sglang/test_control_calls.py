"""What an update asks of a server: every call has an end, reaches the draft model, and flushes once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moerl.errors import WeightSyncError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.sglang.client import ClientTimeouts, SglangClient
from moerl.rollout.sglang.connection import Connection
from moerl.rollout.sglang.faults import ServerError


@pytest.fixture(scope="module")
def server():
    with FakeServer() as running:
        yield running


@pytest.fixture(autouse=True)
def _whole(server):
    yield
    server.set_faults()
    server.call(lambda app: setattr(app.state, "in_update", False))


def ask(server: FakeServer, call: Callable[[SglangClient], Awaitable[object]], **timeouts: float):
    async def main():
        client = SglangClient(server.url, timeouts=ClientTimeouts(**timeouts))
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(main())


def joined(client: SglangClient) -> Awaitable[None]:
    return client.init_group(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo"
    )


CONTROL: dict[str, Callable[[SglangClient], Awaitable[object]]] = {
    "/pause_generation": lambda c: c.pause("abort"),
    "/continue_generation": lambda c: c.continue_generation(),
    "/flush_cache": lambda c: c.flush_cache(),
    "/abort_request": lambda c: c.abort("r"),
    "/release_memory_occupation": lambda c: c.release_memory(["kv_cache"]),
    "/resume_memory_occupation": lambda c: c.resume_memory(["weights"]),
    "/model_info": lambda c: c.model_info(),
    "/server_info": lambda c: c.server_info(),
}
UPDATES: dict[str, Callable[[SglangClient], Awaitable[object]]] = {
    "/begin_weight_update": lambda c: c.begin_update(),
    "/end_weight_update": lambda c: c.end_update(),
    "/destroy_weights_update_group": lambda c: c.destroy_group("g"),
    "/update_weight_version": lambda c: c.relabel("x"),
}
LONG_UPDATES: dict[str, Callable[[SglangClient], Awaitable[object]]] = {
    "/init_weights_update_group": joined,
    "/update_weights_from_disk": lambda c: c.update_from_disk("/nowhere", weight_version=3),
    "/update_weights_from_tensor": lambda c: c.update_from_tensor(["AA=="]),
    "/update_weights_from_distributed": lambda c: c.update_from_distributed(
        [("w", "bfloat16", (2, 3))], group_name="g"
    ),
    "/weights_checker": lambda c: c.checksum(),
}
"""Those that may take as long as a load; the others are done at once."""


@pytest.mark.parametrize("endpoint", [*CONTROL, *UPDATES, *LONG_UPDATES])
def test_a_silent_server_is_late(server, endpoint):
    """Pitfall 20: whatever an update waits for has an end, and the error says what was waited for."""
    server.set_faults({"kind": "hang", "endpoint": endpoint, "times": -1})
    limit = 0.2 if endpoint in LONG_UPDATES else 0.1
    begun = time.monotonic()
    words = rf"^{server.url}{endpoint}: no answer within {limit:g} s"
    with pytest.raises(ServerError if endpoint in CONTROL else WeightSyncError, match=words) as caught:
        ask(server, (CONTROL | UPDATES | LONG_UPDATES)[endpoint], control_seconds=0.1, update_seconds=0.2)
    assert time.monotonic() - begun < 20
    if isinstance(caught.value, ServerError):
        assert caught.value.kind == "late"


def test_every_call_of_an_update_has_a_time_limit_of_its_own(server):
    """What is missing in the table above would be waited for without an end, and nobody would know."""
    handled = {rule.resource.canonical for rule in server.call(lambda app: app.build()).router.routes()}
    asked = {*CONTROL, *UPDATES, *LONG_UPDATES, "/generate", "/health", "/health_generate", "/ready"}
    assert {path for path in handled if not path.startswith("/fake")} == asked


def test_an_update_reaches_the_draft_model_too_and_its_buckets_flush_nothing(server, monkeypatch):
    """Pitfalls 18 and 19: `target` alone would leave a draft its old weights, and a flush is refused while one runs."""
    posted, post = [], Connection.post

    async def noted(self: Connection, endpoint: str, body: dict, **options: Any) -> bytes:
        posted.append((endpoint, body))
        return await post(self, endpoint, body, **options)

    async def update(client: SglangClient):
        await client.begin_update()
        await client.update_from_tensor(["AA=="])
        await joined(client)
        await client.update_from_distributed([("w", "bfloat16", (2, 3))], group_name="g", weight_version=8)
        await client.end_update()
        await client.checksum()

    monkeypatch.setattr(Connection, "post", noted)
    ask(server, update)
    bodies = dict(posted)
    buckets = [bodies[f"/update_weights_from_{kind}"] for kind in ("tensor", "distributed")]
    assert [body["selector"] for body in (bodies["/begin_weight_update"], *buckets)] == ["all"] * 3
    assert bodies["/weights_checker"]["selector"] == "all"
    assert [body["flush_cache"] for body in buckets] == [False, False]


def test_a_busy_server_is_asked_to_flush_again_and_slower(server, monkeypatch):
    """Pitfall 19: each wait is twice the one before, and after the last refusal nothing is waited for."""
    waits, sleep = [], asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("moerl.rollout.sglang.client.asyncio.sleep", noted)
    server.set_faults({"kind": "status", "endpoint": "/flush_cache", "status": 400, "times": 2})
    ask(server, lambda c: c.flush_cache())
    assert waits == [0.2, 0.4]
    server.set_faults({"kind": "status", "endpoint": "/flush_cache", "status": 400, "times": -1})
    with pytest.raises(ServerError, match="flush_cache: status 400"):
        ask(server, lambda c: c.flush_cache())
    assert waits[2:] == [0.2, 0.4, 0.8, 1.6]
    server.set_faults({"kind": "status", "endpoint": "/flush_cache", "status": 500, "times": -1})
    with pytest.raises(ServerError, match="flush_cache: status 500"):
        ask(server, lambda c: c.flush_cache())
    assert len(waits) == 6, "what is no refusal is not asked again"
