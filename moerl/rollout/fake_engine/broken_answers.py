"""How a fake server breaks an answer: cut off, without a length, compressed, or without an end."""

from __future__ import annotations

import asyncio
import contextlib
import gzip

from aiohttp import web

from moerl.rollout.fake_engine.fault_rules import FaultRule

CHUNK_BYTES = 1000


def cut(request: web.Request) -> web.Response:
    """Close the connection under the request; what is returned goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


async def mangled(request: web.Request, response: web.StreamResponse, rules: list[FaultRule]) -> web.StreamResponse:
    """`response`, unless a rule cuts it off."""
    kinds = {rule.kind for rule in rules}
    if "drop_after" in kinds:
        return cut(request)
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
        return response
    if "chunked" in kinds:
        return await _chunked(request, response, response.body)
    if "gzip" in kinds:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=gzip.compress(response.body), status=response.status, headers=headers)
    if "truncate" not in kinds:
        return response
    short = web.StreamResponse(status=response.status, headers={"Content-Type": "application/json"})
    short.content_length = len(response.body)
    await short.prepare(request)
    await short.write(response.body[: len(response.body) // 2])
    return _cut_stream(request, short)


async def _chunked(request: web.Request, response: web.Response, body: bytes) -> web.StreamResponse:
    """`body` without its length, in several chunks."""
    parts = web.StreamResponse(status=response.status, headers={"Content-Type": "application/json"})
    parts.enable_chunked_encoding()
    await parts.prepare(request)
    for start in range(0, len(body), CHUNK_BYTES):
        await parts.write(body[start : start + CHUNK_BYTES])
    await parts.write_eof()
    return parts


async def endless(request: web.Request, status: int) -> web.StreamResponse:
    """Blanks until the other side has had enough."""
    response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b" " * CHUNK_BYTES)
            await asyncio.sleep(0)
    return response


def _cut_stream(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.close()
    return response
