"""HTTP to one server: one place that sends, bounds, times and reads, so that every answer is checked the same way."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from yarl import URL

from moerl.errors import ConfigError
from moerl.rollout.sglang.faults import FaultKind, ServerError, shown

MAX_ANSWER_BYTES = 1 << 30
"""Beyond it an answer is given up. A token's routes are 4 bytes a layer and expert, and 4/3 of that as base64, so
32,768 tokens of 48 layers x 8 experts take 67 MB, and 131,072 of 61 layers x 8 take 341 MB; logprobs and ids add some
50 bytes a token. The largest that is ever asked for is a sampling mask of 4,096 ids at each of 32,768 steps: 0.9 GB."""
MAX_WORDS_BYTES = 1 << 16
"""Of an answer that is no 200: its words are repeated cut, so the rest is not read."""
IDLE_SECONDS = 2.0
"""A connection that nobody used for longer is not used again: SGLang closes its side after 5 s
(SGLANG_TIMEOUT_KEEP_ALIVE), and a request that crosses with that looks like a server that died."""

SPARE_HANDLES = 1024
"""Open files beside the requests' sockets: the run's own, aborts, health checks."""

logger = logging.getLogger(__name__)

_BUSY = (429, 503)
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, asyncio.IncompleteReadError)


def check_url(url: str, *, where: str = "server URL") -> str:
    """`url` without a slash at its end.

    Raises:
        ConfigError: not `http(s)://host[:port]`.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{where} is {url!r} ({error}); write it like http://127.0.0.1:30000") from error
    if parts.username or parts.password:
        raise ConfigError(f"{where} of host {parts.hostname} carries a user or password; give the key as admin_key")
    plain = parts.scheme in {"http", "https"} and parts.hostname and not (parts.query or parts.fragment)
    if not plain or parts.path not in {"", "/"} or port == 0:
        raise ConfigError(f"{where} is {url!r}, but must be a host alone, like http://127.0.0.1:30000")
    return url.rstrip("/")


def allow_sockets(number: int) -> None:
    """Let this process have `number` sockets at once; says so where the system allows fewer.

    Many systems begin with 1,024 open files. Beyond them a new connection fails as if its server were gone.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + SPARE_HANDLES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        logger.warning(
            "up to %d requests run at once, and this process may open %d files: beyond that servers look dead. Raise "
            "the limit (ulimit -Hn) to %d, or lower rollout.engine.requests_per_server",
            number,
            hard,
            needed,
        )


class Connection:
    """Sends JSON to one server and reads whole answers. Belongs to the event loop of its first call."""

    def __init__(self, url: str, *, admin_key: str | None, connect_seconds: float, max_answer_bytes: int) -> None:
        """`admin_key` goes into a header of every call and into no message."""
        self.url = check_url(url)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if admin_key:
            self._headers["Authorization"] = f"Bearer {admin_key}"
        self._connect_seconds = connect_seconds
        self._max_answer_bytes = max_answer_bytes
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}

    async def post(self, endpoint: str, body: Any, *, seconds: float | None, method: str = "POST") -> bytes:
        """Body of a 200 answer.

        Args:
            endpoint: path with its slash.
            body: what orjson can write.
            seconds: for the whole call; None waits for ever.
            method: POST, or GET (`body` is not sent then).

        Raises:
            ServerError: anything but a whole 200 answer.
        """
        data = orjson.dumps(body) if method == "POST" else None
        try:
            async with asyncio.timeout(seconds):
                return await self._call(method, endpoint, data)
        except TimeoutError as error:
            # aiohttp's own connect timeout is a TimeoutError too; both mean that nothing came in time
            after = f"within {seconds:g} s" if seconds else f"and no connection within {self._connect_seconds:g} s"
            raise self.fault(
                "late", endpoint, f"no answer {after}", "see the server's log, or raise the time limit"
            ) from error

    async def _call(self, method: str, endpoint: str, data: bytes | None) -> bytes:
        try:
            url = self._urls.get(endpoint) or self._urls.setdefault(endpoint, URL(self.url + endpoint))
            async with self._opened().request(method, url, data=data, allow_redirects=False) as response:
                status = response.status
                body = await (self._whole(endpoint, response) if status == 200 else _beginning(response))
        except _LOST as error:
            raise self.fault(
                "lost",
                endpoint,
                f"no whole answer ({type(error).__name__}: {shown(str(error))})",
                "check that the server lives, and its log",
            ) from error
        except aiohttp.ClientError as error:
            raise self.fault(
                "bad_answer",
                endpoint,
                f"an answer that is no HTTP ({type(error).__name__}: {shown(str(error))})",
                "check that the URL is that of an SGLang server",
            ) from error
        if status != 200:
            raise self._status_fault(endpoint, status, body)
        return body

    async def _whole(self, endpoint: str, response: aiohttp.ClientResponse) -> bytes:
        """The body, which may not say how long it is: what passes the bound is given up where it passes it."""
        if encoding := response.headers.get("Content-Encoding", "").lower().replace("identity", ""):
            raise self.fault(
                "bad_answer",
                endpoint,
                f"an answer with Content-Encoding {shown(encoding)!r}, although none was asked for",
                "switch compression off in the server, or in what stands between it and here",
            )
        if response.content_length is not None:
            self._refuse_beyond(endpoint, response.content_length, "")
            return await response.read()
        parts, size = [], 0
        async for part in response.content.iter_any():
            size += len(part)
            self._refuse_beyond(endpoint, size, " or more (it does not say how long it is)")
            parts.append(part)
        return b"".join(parts)

    def _refuse_beyond(self, endpoint: str, size: int, more: str) -> None:
        if size > self._max_answer_bytes:
            raise self.fault(
                "bad_answer",
                endpoint,
                f"an answer of {size} bytes{more}",
                f"{self._max_answer_bytes} are allowed; ask for fewer tokens or logprobs",
            )

    def parsed(self, endpoint: str, body: bytes) -> Any:
        """The JSON of `body`.

        Raises:
            ServerError: it is none (NaN and Infinity are none either).
        """
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise self.fault(
                "bad_answer",
                endpoint,
                f"an answer that is no JSON ({error}): {shown(body[:400].decode(errors='replace'))}",
                "check the server's version and its log",
            ) from error

    def fault(self, kind: FaultKind, endpoint: str, came: str, do: str) -> ServerError:
        """A fault of this server."""
        return ServerError(kind, self.url, endpoint, came, do)

    async def close(self) -> None:
        """Close the sockets; what still runs on the server is aborted by it."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,  # a small answer could become one of any size
            )
        return self._session

    def _status_fault(self, endpoint: str, status: int, body: bytes) -> ServerError:
        kind: FaultKind = "busy" if status in _BUSY else "broken" if status >= 500 else "refused"
        if 300 <= status < 400:
            kind = "bad_answer"
        do = {
            "busy": "it takes requests again later",
            "broken": "see the server's log",
            "refused": "the request does not fit this server: check its version, flags and key",
            "bad_answer": "give the URL that it redirects to",
        }[kind]
        return self.fault(kind, endpoint, f"status {status}: {_words(body)}", do)


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """What is repeated of a body; where more would come, leaving the response closes its connection."""
    found = b""
    async for part in response.content.iter_any():
        found += part
        if len(found) >= MAX_WORDS_BYTES:
            break
    return found[:MAX_WORDS_BYTES]


def _words(body: bytes) -> str:
    """What a server said, without its JSON where it is of the known forms."""
    text = body[:4000].decode(errors="replace")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return shown(text) or "no words"
    if isinstance(value, dict):
        inner = value.get("error", value.get("message", value.get("detail")))
        inner = inner.get("message") if isinstance(inner, dict) else inner
        text = inner if isinstance(inner, str) else text
    return shown(text) or "no words"
