"""The control endpoints of one server: what is asked, what is believed, and what a failure says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from fake_servers import prompt_of

from moerl.errors import ConfigError, RolloutError, WeightSyncError
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.client import ClientTimeouts, SglangClient
from moerl.rollout.sglang.connection import MAX_ANSWER_BYTES
from moerl.rollout.sglang.faults import ServerError
from moerl.rollout.sglang.routes import encode_routes
from moerl.rollout.sglang.wire import WireRequest, payload
from moerl.types import SamplingParams

KEY = "a-key-that-no-message-may-hold"
CALLS: dict[str, tuple[str, Callable[[SglangClient], Awaitable[object]]]] = {
    "pause": ("/pause_generation", lambda c: c.pause("abort")),
    "continue": ("/continue_generation", lambda c: c.continue_generation()),
    "begin": ("/begin_weight_update", lambda c: c.begin_update()),
    "end": ("/end_weight_update", lambda c: c.end_update()),
    "disk": ("/update_weights_from_disk", lambda c: c.update_from_disk("/nowhere", weight_version=3)),
    "tensor": ("/update_weights_from_tensor", lambda c: c.update_from_tensor(["AA=="])),
    "distributed": (
        "/update_weights_from_distributed",
        lambda c: c.update_from_distributed([("w", "bfloat16", (2, 3))], group_name="g"),
    ),
    "destroy": ("/destroy_weights_update_group", lambda c: c.destroy_group("g")),
    "checksum": ("/weights_checker", lambda c: c.checksum()),
    "relabel": ("/update_weight_version", lambda c: c.relabel("x")),
    "abort": ("/abort_request", lambda c: c.abort("r")),
    "release": ("/release_memory_occupation", lambda c: c.release_memory(["kv_cache"])),
    "model_info": ("/model_info", lambda c: c.model_info()),
    "server_info": ("/server_info", lambda c: c.server_info()),
}
UPDATES = {"begin", "end", "disk", "tensor", "distributed", "destroy", "checksum", "relabel"}
EMPTY_ANSWER = {"abort", "release"}
"""Their answer has nothing to check but its status."""


@pytest.fixture(scope="module")
def server():
    with FakeServer(FakeEngineConfig(admin_key=KEY)) as running:
        yield running


@pytest.fixture(autouse=True)
def _whole(server):
    yield
    server.set_faults()
    server.call(lambda app: app.state.resume())


def ask(server: FakeServer, call: Callable[[SglangClient], Awaitable[object]], **timeouts: float):
    async def main():
        client = SglangClient(server.url, admin_key=KEY, timeouts=ClientTimeouts(**timeouts))
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(main())


def test_a_whole_update_in_the_servers_words(server):
    async def update(client: SglangClient):
        before = await client.checksum()
        await client.pause("retract")
        await client.init_group(
            master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo"
        )
        await client.begin_update()
        await client.update_from_tensor(["AA=="])
        await client.update_from_distributed([("w", "bfloat16", (2, 3))], group_name="g", weight_version=8)
        await client.end_update()
        await client.destroy_group("g")
        await client.flush_cache()
        await client.continue_generation()
        return before, await client.checksum(), await client.model_info(), await client.server_info()

    before, after, model, info = ask(server, update)
    assert before.engine != after.engine
    assert model.weight_version == "8"
    assert (info.version, info.tensor_size, info.data_size, info.returns_routes) == ("0.5.23", 1, 1, True)
    assert server.state()["names"] == ["w"]


def test_buckets_outside_a_session_are_refused(server):
    with pytest.raises(WeightSyncError, match="from_tensor: status 400: call /begin_weight_update first"):
        ask(server, lambda c: c.update_from_tensor(["AA=="]))


def test_memory_by_tags_and_never_all_by_chance(server):
    ask(server, lambda c: c.release_memory(["kv_cache", "weights"]))
    ask(server, lambda c: c.resume_memory(["weights"]))
    assert server.state()["released"] == ["kv_cache"]
    with pytest.raises(RolloutError, match="no tags, which would mean all"):
        ask(server, lambda c: c.release_memory([]))


def test_an_empty_rid_would_abort_everything(server):
    with pytest.raises(RolloutError, match="an empty rid"):
        ask(server, lambda c: c.abort(""))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_status_is_an_error_that_names_server_endpoint_and_words(server, name, status):
    endpoint, call = CALLS[name]
    server.set_faults({"kind": "status", "endpoint": endpoint, "status": status})
    with pytest.raises(WeightSyncError if name in UPDATES else ServerError) as caught:
        ask(server, call)
    assert f"{server.url}{endpoint}: status {status}: a fault that was asked for; " in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(CALLS) - EMPTY_ANSWER))
@pytest.mark.parametrize("kind", ["no_json", "truncate", "drop", "drop_after"])
def test_an_answer_that_is_none_is_an_error(server, name, kind):
    endpoint, call = CALLS[name]
    server.set_faults({"kind": kind, "endpoint": endpoint, "times": -1})
    with pytest.raises(
        WeightSyncError if name in UPDATES else ServerError, match=r"no JSON|no whole answer|status 400"
    ):
        ask(server, call)


@pytest.mark.parametrize("name", sorted(UPDATES - {"disk", "tensor", "distributed", "destroy", "end"}))
def test_success_false_is_an_error(server, name):
    endpoint, call = CALLS[name]
    server.set_faults({"kind": "refuse", "endpoint": endpoint})
    with pytest.raises(WeightSyncError, match="a refusal that was asked for"):
        ask(server, call)


def test_an_answer_without_its_fields_is_an_error(server):
    server.set_faults({"kind": "forget", "endpoint": "/weights_checker"}, {"kind": "forget", "endpoint": "/model_info"})
    with pytest.raises(WeightSyncError, match="an answer without per_engine_checksum and ranks"):
        ask(server, lambda c: c.checksum())
    with pytest.raises(RolloutError, match="an answer without model_path and weight_version"):
        ask(server, lambda c: c.model_info())


@pytest.mark.parametrize(
    ("rule", "kind"),
    [({"kind": "status", "status": 503}, "busy"), ({"kind": "hang"}, "late"), ({"kind": "drop"}, "lost")],
)
def test_a_health_check_that_fails_says_whether_the_process_may_be_gone(server, rule, kind):
    ask(server, lambda c: c.check_health())
    server.set_faults({**rule, "endpoint": "/health", "times": -1})
    with pytest.raises(ServerError) as caught:
        ask(server, lambda c: c.check_health(), health_seconds=0.2)
    assert caught.value.kind == kind


def test_a_health_check_waits_longer_than_the_server_itself():
    """SGLang gives its scheduler 20 s and then says 503; who waits for less takes a busy server for a silent one."""
    assert ClientTimeouts().health_seconds > 20


def test_without_the_key_control_is_refused_and_no_message_holds_it(server):
    async def main(key: str | None):
        client = SglangClient(server.url, admin_key=key)
        try:
            await client.pause("abort")
        finally:
            await client.close()

    for key in (None, KEY + "x"):
        with pytest.raises(ServerError, match="status 401: Unauthorized") as caught:
            asyncio.run(main(key))
        assert KEY not in str(caught.value)
    client = SglangClient(server.url, admin_key=KEY)
    assert KEY not in repr(client)


def test_no_server_at_all_names_the_url():
    with pytest.raises(
        ServerError, match=r"^http://127.0.0.1:9/model_info: no whole answer .*check that the server lives"
    ):
        asyncio.run(SglangClient("http://127.0.0.1:9").model_info())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:30000", "must be a host alone"),
        ("ftp://a", "must be a host alone"),
        ("http://a:b", "write it like"),
        ("http://a/generate", "must be a host alone"),
        ("http://me:secret@a", "carries a user or password"),
    ],
)
def test_urls_are_checked(url, words):
    with pytest.raises(ConfigError, match=words) as caught:
        SglangClient(url)
    assert "secret" not in str(caught.value)


def test_an_answer_beyond_the_bound_is_not_read(server):
    async def main():
        client = SglangClient(server.url, max_answer_bytes=100)
        try:
            await client.generate(payload(WireRequest("r-1", prompt_of(4), SamplingParams(9), 0)))
        finally:
            await client.close()

    with pytest.raises(ServerError, match=r"an answer of \d+ bytes; 100 are allowed"):
        asyncio.run(main())


def bounded(server: FakeServer, limit: int, budget: int = 9):
    """One answer to /generate by a client that takes `limit` bytes."""

    async def main():
        client = SglangClient(server.url, max_answer_bytes=limit)
        try:
            return await client.generate(payload(WireRequest("r-1", prompt_of(4), SamplingParams(budget), 0)))
        finally:
            await client.close()

    return asyncio.run(main())


def test_an_answer_without_its_length_is_read_whole_and_bounded_where_it_passes_the_bound(server):
    whole = bounded(server, 1 << 20, 500)
    server.set_faults({"kind": "chunked", "times": -1})
    assert bounded(server, 1 << 20, 500)["output_ids"] == whole["output_ids"]
    with pytest.raises(ServerError, match=r"generate: an answer of \d+ bytes or more .*; 2000 are allowed; ask"):
        bounded(server, 2000, 500)


def test_a_server_that_never_stops_sending_is_given_up_with_little_read(server):
    server.set_faults({"kind": "endless", "status": 200, "times": -1})
    with pytest.raises(ServerError, match=r"an answer of (\d+) bytes or more \(it does not say how long") as caught:
        bounded(server, 1 << 20)
    read = int(str(caught.value).partition("an answer of ")[2].split()[0])
    assert 1 << 20 < read < 2 << 20
    assert caught.value.kind == "bad_answer"
    assert not caught.value.is_retried, "the same request would bring it again"
    server.set_faults()
    assert bounded(server, 1 << 20)["output_ids"]


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"])
def test_a_body_that_only_its_end_would_close_is_bounded_too(head):
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b" " * 4096)
                await writer.drain()

    async def main():
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            client = SglangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", max_answer_bytes=1 << 20)
            try:
                await client.model_info()
            finally:
                await client.close()

    with pytest.raises(ServerError, match=r"an answer of \d+ bytes or more"):
        asyncio.run(asyncio.wait_for(main(), 60))


def test_an_error_that_never_stops_is_still_known_by_its_status(server):
    server.set_faults({"kind": "endless", "status": 503, "times": -1})
    with pytest.raises(ServerError, match="generate: status 503: no words; it takes requests again later") as caught:
        bounded(server, 1 << 20)
    assert caught.value.kind == "busy"


def test_compressed_answers_are_not_unpacked(server):
    server.set_faults({"kind": "gzip", "times": -1})
    with pytest.raises(ServerError, match="Content-Encoding 'gzip', although none was asked for; switch"):
        bounded(server, 1 << 20)


def test_the_longest_answers_that_are_asked_for_fit_the_bound():
    def routes(tokens: int, layers: int, experts: int) -> int:
        return len(encode_routes(np.zeros((tokens // 1024, layers, experts), dtype=np.int32))) * 1024

    assert 3 * routes(32_768, 48, 8) < MAX_ANSWER_BYTES
    assert 2 * routes(131_072, 61, 8) < MAX_ANSWER_BYTES
    mask = len(b"151935,") * 4096 * 32_768
    assert mask < MAX_ANSWER_BYTES


def test_requests_are_checked_as_by_the_real_server(server):
    def send(**changes):
        body = payload(WireRequest("r-1", prompt_of(4), SamplingParams(2), 0))
        sampling = body["sampling_params"] | changes.pop("sampling", {})
        return ask(server, lambda c: c.generate(body | {"sampling_params": sampling} | changes))

    send(misspelt_option=True)  # unknown beside sampling: not a word
    for changes, words in (
        ({"sampling": {"max_tokens": 3}}, "Unexpected keyword argument 'max_tokens'"),
        ({"routed_experts_start_len": 5}, r"must be in \[0, 4\]"),
        ({"routed_dp_rank": 1}, "out of range"),
        ({"return_sampling_mask": True}, "return_sampling_mask requires top_k"),
        ({"input_ids": []}, "input_ids must be"),
    ):
        with pytest.raises(ServerError, match=words) as caught:
            send(**changes)
        assert caught.value.kind == "refused"


def test_a_client_that_goes_away_aborts_its_request():
    """Pitfall 10, and why the time limit of a request is longer than the longest pause."""
    with FakeServer(FakeEngineConfig(token_seconds=0.05)) as slow:
        body = payload(WireRequest("r-1", prompt_of(4), SamplingParams(1000), 0))

        async def main():
            client = SglangClient(slow.url)
            try:
                await client.generate(body, timeout_seconds=0.1)
            finally:
                await client.close()

        with pytest.raises(ServerError, match=r"generate: no answer within 0.1 s"):
            asyncio.run(main())
        end = time.monotonic() + 10
        while slow.state()["running"] and time.monotonic() < end:
            time.sleep(0.01)
        assert slow.state()["running"] == []


def test_abort_takes_every_rid_that_begins_so():
    """The reason why rids are all of one length here: the scheduler compares the beginnings."""
    with FakeServer(FakeEngineConfig(token_seconds=0.05)) as slow:

        async def main():
            client = SglangClient(slow.url)
            rids = ["a#1", "a#10", "b#1"]
            tasks = [
                asyncio.create_task(client.generate(payload(WireRequest(rid, prompt_of(4), SamplingParams(40), 0))))
                for rid in rids
            ]
            while len(slow.call(lambda app: list(app.state.running))) < 3:
                await asyncio.sleep(0.01)
            await client.abort("a#1")
            answers = await asyncio.gather(*tasks)
            await client.close()
            return [answer["meta_info"]["finish_reason"]["type"] for answer in answers]

        assert asyncio.run(main()) == ["abort", "abort", "length"]
