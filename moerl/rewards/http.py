"""Asks a service over HTTP for verdicts: deadlines, retries, bounded concurrency, bounded bodies, no redirects.

One thread with an event loop of its own holds the connections, so that it serves any thread and any event loop. Nothing
of a header ever reaches a log or an error: a secret is read from a file, or from a variable of the environment that the
configuration names.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import tenacity

from moerl.errors import ConfigError
from moerl.rewards.base import RewardConfig, UnscoredError

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that may be better the next time."""


@dataclass
class HttpConfig(RewardConfig):
    """What every reward that asks a service is told."""

    url: str = ""
    """`http://` or `https://`."""
    timeout_seconds: float = 60.0
    """Of one answer, all tries of it together."""
    max_tries: int = 3
    """Requests for one answer; what is not there, late or overloaded is asked again, a refusal is not."""
    max_concurrency: int = 64
    """Requests at once."""
    max_response_bytes: int = 1_048_576
    headers_from_env: dict[str, str] = field(default_factory=dict)
    """Header -> name of the environment variable with its value, such as `{Authorization: JUDGE_AUTHORIZATION}`."""
    headers_from_file: dict[str, str] = field(default_factory=dict)
    """Header -> path of the file with its value."""


class RequestError(Exception):
    """One try that brought no answer; `kind` is a word of `scorer.ERROR_KINDS`."""

    def __init__(self, kind: str, text: str, *, is_final: bool) -> None:
        super().__init__(text)
        self.kind = kind
        self.is_final = is_final


class Retries:
    """Requests that were made again, for one reader."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int) -> None:
        """Count so many more."""
        self._count += count

    def take(self) -> int:
        """Since the last call."""
        count, self._count = self._count, 0
        return count


class JsonService:
    """Posts JSON to one URL and gives back the JSON object that is answered."""

    def __init__(self, config: HttpConfig, name: str) -> None:
        """Starts nothing yet. `name` is what messages call the reward.

        Raises:
            ConfigError: a number or URL that cannot be, or a secret that is not there.
        """
        _check(config, name)
        self._config = config
        self._name = name
        self._headers = _headers(config, name)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._gate: asyncio.Semaphore | None = None

    async def ask(self, body: Mapping[str, Any], retries: Retries) -> dict[str, Any]:
        """The answer to `body`; counts in `retries`. The deadline counts from when the request's turn has come.

        Raises:
            UnscoredError: no answer in time, a refusal, or one that is no JSON object; `timeout` or `exception`.
        """
        loop = self._started()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._in_time(body, retries), loop))

    def close(self) -> None:
        """Close the connections and end the thread. May be called twice."""
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._shut(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._session = self._gate = None
                self._thread = threading.Thread(target=self._loop.run_forever, name=f"reward-{self._name}", daemon=True)
                self._thread.start()
            return self._loop

    async def _shut(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _in_time(self, body: Mapping[str, Any], retries: Retries) -> dict[str, Any]:
        config = self._config
        if self._session is None or self._gate is None:
            self._gate = asyncio.Semaphore(config.max_concurrency)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=config.max_concurrency),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        async with self._gate:
            try:
                async with asyncio.timeout(config.timeout_seconds):
                    return await self._with_retries(self._session, body, retries)
            except TimeoutError:
                raise UnscoredError("timeout", f"no answer within {config.timeout_seconds:g} s") from None
            except RequestError as error:
                raise UnscoredError(error.kind, str(error)) from None

    async def _with_retries(
        self, session: aiohttp.ClientSession, body: Mapping[str, Any], retries: Retries
    ) -> dict[str, Any]:
        tries = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._config.max_tries),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=10.0),
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, RequestError) and not error.is_final),
            reraise=True,
        )
        async for attempt in tries:
            with attempt:
                retries.add(attempt.retry_state.attempt_number > 1)
                return await self._once(session, body)
        raise AssertionError("tenacity ends with a result or raises")

    async def _once(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with session.post(
                self._config.url, json=body, headers=self._headers, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    is_final = answer.status not in RETRIED
                    raise RequestError("exception", f"HTTP status {answer.status}", is_final=is_final)
                data = await self._bounded(answer)
        except (aiohttp.ClientError, OSError) as error:
            raise RequestError("exception", f"{type(error).__name__}", is_final=False) from None
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            raise RequestError("exception", "the answer is not JSON", is_final=True) from None
        if not isinstance(found, dict):
            raise RequestError("exception", "the answer is not a JSON object", is_final=True)
        return found

    async def _bounded(self, answer: aiohttp.ClientResponse) -> bytes:
        limit, data = self._config.max_response_bytes, bytearray()
        async for chunk in answer.content.iter_chunked(1 << 16):
            data += chunk
            if len(data) > limit:
                raise RequestError("exception", f"the answer is longer than {limit} bytes", is_final=True)
        return bytes(data)


def _check(config: HttpConfig, name: str) -> None:
    where = f"reward {name}"
    parts = urlsplit(config.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{where}: url={_plain(config.url)!r} must be an http:// or https:// address")
    if parts.username or parts.password:
        raise ConfigError(f"{where}: url must hold no user or password; use headers_from_env or headers_from_file")
    for word, value in (("max_tries", config.max_tries), ("max_concurrency", config.max_concurrency)):
        if value < 1:
            raise ConfigError(f"{where}: {word}={value} must be 1 or more")
    if not config.timeout_seconds > 0:
        raise ConfigError(f"{where}: timeout_seconds={config.timeout_seconds} must be above 0")
    if config.max_response_bytes < 2:
        raise ConfigError(f"{where}: max_response_bytes={config.max_response_bytes} must be 2 or more")


def _plain(url: str) -> str:
    """Without what may be a secret in front of the host."""
    return url.rpartition("@")[2][:80]


def _headers(config: HttpConfig, name: str) -> dict[str, str]:
    headers = {}
    for header, variable in config.headers_from_env.items():
        value = os.environ.get(variable)
        if value is None:
            raise ConfigError(
                f"reward {name}: headers_from_env.{header} names the environment variable {variable}, which is not set"
            )
        headers[header] = _header(value, f"the environment variable {variable}", name)
    for header, path in config.headers_from_file.items():
        try:
            value = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = type(error).__name__
            raise ConfigError(f"reward {name}: headers_from_file.{header}={path} cannot be read ({reason})") from None
        headers[header] = _header(value, path, name)
    return headers


def _header(value: str, where: str, name: str) -> str:
    value = value.strip()
    if not value or not value.isprintable():
        raise ConfigError(f"reward {name}: {where} must hold one line of text for a header")
    return value
