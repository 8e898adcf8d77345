"""Connections that a server closes while nobody uses them."""

from __future__ import annotations

import asyncio
import resource

import pytest

from moerl.rollout.sglang import connection
from moerl.rollout.sglang.connection import SPARE_HANDLES, Connection, allow_sockets

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def test_a_connection_that_lay_idle_is_not_used_again(monkeypatch):
    """The server gives up every connection on its second request, as one whose time to keep it had come would."""
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.2)
    opened = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        writer.write(ANSWER)
        await writer.drain()
        await reader.read(1)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = Connection(url, admin_key=None, connect_seconds=5.0, max_answer_bytes=1 << 20)
        for _ in range(3):
            assert await client.post("/generate", {"a": 1}, seconds=5.0) == b"{}"
            await asyncio.sleep(0.5)
        await client.close()
        server.close()

    asyncio.run(main())
    assert len(opened) == 3


def test_what_is_idle_is_left_before_sglang_closes_it():
    assert connection.IDLE_SECONDS < 5, "the default of SGLANG_TIMEOUT_KEEP_ALIVE in 0.5.23"


@pytest.mark.parametrize(
    ("limits", "becomes"),
    [
        ((1024, 1 << 20), (16384 + SPARE_HANDLES, 1 << 20)),
        ((1024, resource.RLIM_INFINITY), (16384 + SPARE_HANDLES, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        ((1 << 20, 1 << 20), None),
        ((1024, 4096), (4096, 4096)),
    ],
)
def test_64_servers_of_256_requests_each_may_have_their_sockets(monkeypatch, caplog, limits, becomes):
    """Most systems begin with 1,024 open files; a socket beyond them fails as if its server were gone."""
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: made.append((which, new)))
    allow_sockets(64 * 256)
    assert made == ([] if becomes is None else [(resource.RLIMIT_NOFILE, becomes)])
    words = "up to 16384 requests run at once, and this process may open 4096 files"
    assert (words in caplog.text) == (limits[1] == 4096)
