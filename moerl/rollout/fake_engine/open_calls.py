"""The calls that a fake server has not answered yet: when it dies, so do they."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenCalls:
    """Of one server, `/fake/*` left out: who steers it is no client of it."""

    def __init__(self) -> None:
        self._calls: dict[int, web.Request] = {}
        """By their identity: a request is a mapping, and has no hash."""

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note the call until it is answered."""
        if request.path.startswith("/fake"):
            return await handler(request)
        self._calls[id(request)] = request
        try:
            return await handler(request)
        finally:
            del self._calls[id(request)]

    def cut(self) -> None:
        """Close every connection under its call; the handlers are cancelled by that."""
        for request in self._calls.values():
            if request.transport is not None:
                request.transport.abort()
