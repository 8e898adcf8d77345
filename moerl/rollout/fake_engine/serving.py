"""Run a fake server: for ever in this process, or on a thread of its own for as long as a test needs it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohttp import web

from moerl.errors import RolloutError
from moerl.rollout.fake_engine.app import FakeApp
from moerl.rollout.fake_engine.fault_rules import read_rules
from moerl.rollout.fake_engine.server_state import ServerState
from moerl.rollout.fake_engine.settings import FakeEngineConfig

T = TypeVar("T")

_START_SECONDS = 30.0


async def serve(
    cfg: FakeEngineConfig, rules: Sequence[Mapping[str, Any]], ready: Callable[[str, FakeApp], None]
) -> None:
    """Serve until cancelled; `ready` is called with the URL once the port is open.

    Raises:
        RolloutError: the port cannot be had.
    """
    app = FakeApp(ServerState(cfg, read_rules(list(rules))))
    runner = web.AppRunner(app.build(), access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, cfg.host, cfg.port, shutdown_timeout=0.0, reuse_address=True, backlog=2048)
        try:
            await site.start()
        except OSError as error:
            raise RolloutError(
                f"the fake engine cannot listen on {cfg.host}:{cfg.port} ({error.strerror}); choose another port, or 0 "
                "for any free one"
            ) from error
        ready(f"http://{cfg.host}:{runner.addresses[0][1]}", app)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


class FakeServer:
    """A fake server on a thread of its own: `with FakeServer(cfg) as server: ... server.url`."""

    def __init__(self, cfg: FakeEngineConfig | None = None, faults: Sequence[Mapping[str, Any]] = ()) -> None:
        """`faults` as in `fault_rules.FaultRule`."""
        self.cfg = cfg or FakeEngineConfig()
        self.url = ""
        self._faults = list(faults)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._app: FakeApp | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def app(self) -> FakeApp:
        """Of the running server."""
        if self._app is None:
            raise RolloutError("the fake server does not run; use it in a `with` block")
        return self._app

    def start(self) -> None:
        """Open the port and return; a second start takes the same port again.

        Raises:
            RolloutError: the port cannot be had.
        """
        self._ready.clear()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()
        self._ready.wait(_START_SECONDS)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Close every connection and the port."""
        loop, task, thread = self._loop, self._task, self._thread
        if loop is None or task is None or thread is None:
            return
        loop.call_soon_threadsafe(task.cancel)
        thread.join(_START_SECONDS)
        self._loop = self._task = self._thread = self._app = None

    def state(self) -> dict[str, Any]:
        """As `GET /fake/state`."""
        return self.call(lambda app: app.state.described())

    def set_faults(self, *faults: Mapping[str, Any]) -> None:
        """Replace the schedule of faults."""
        rules = read_rules(list(faults))
        self.call(lambda app: app.state.__setattr__("rules", rules))

    def restart(self, seconds: float = 0.0) -> None:
        """As a crash and a new start after `seconds`."""
        self.call(lambda app: app.crash(seconds))

    def call(self, function: Callable[[FakeApp], T]) -> T:
        """Run `function` in the server's thread."""
        if self._loop is None:
            raise RolloutError("the fake server does not run; use it in a `with` block")

        async def on_loop() -> T:
            return function(self.app)

        coroutine: Coroutine[Any, Any, T] = on_loop()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_START_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except RolloutError as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        await serve(self.cfg, self._faults, self._on_ready)

    def _on_ready(self, url: str, app: FakeApp) -> None:
        self.url, self._app = url, app
        if not self.cfg.port:
            from dataclasses import replace

            self.cfg = replace(self.cfg, port=int(url.rpartition(":")[2]))
        self._ready.set()
