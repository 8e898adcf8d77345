"""The engine of remote SGLang servers: one engine over all of them, on an event loop of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from moerl.errors import ConfigError, RolloutError
from moerl.metrics import Last, Metrics
from moerl.rollout.engine import ServedModel, engines
from moerl.rollout.sglang.bridge import Bridge, serve_loop
from moerl.rollout.sglang.counts import Differences
from moerl.rollout.sglang.engine_config import SglangEngineConfig, launched_here, wants_routes
from moerl.rollout.sglang.model_support import FP32_ROUNDING, refuse_other_arithmetic
from moerl.rollout.sglang.suited import look_at_servers
from moerl.types import Completion, SamplingParams, WeightBucket

if TYPE_CHECKING:
    from moerl.rollout.sglang.client import SglangClient
    from moerl.rollout.sglang.dispatcher import Dispatcher
    from moerl.rollout.sglang.nodes import Elsewhere, Launched
    from moerl.rollout.sglang.restarts import Restarts
    from moerl.rollout.sglang.servers import Server
    from moerl.rollout.sglang.updates import Updates, WeightSender
    from moerl.rollout.sglang.watch import Watch

T = TypeVar("T")


def check_model(cfg: SglangEngineConfig, folder: Path) -> None:
    """Raises ConfigError where the servers of `cfg` would compute another model than that of `folder`."""
    tensor = (cfg.servers or {}).get("tensor", 1)
    refuse_other_arithmetic(folder, tensor if isinstance(tensor, int) else 1)


@engines.register(
    "sglang",
    SglangEngineConfig,
    injects=("served_model", "policy_version", "sender", "elsewhere"),
    returns_topk=True,
    check_model=check_model,
    fp32_rounding=FP32_ROUNDING,
)
class SglangEngine:
    """Keeps `RolloutEngine`. May be called from any event loop, and from several threads at once.

    Nothing is connected before the first call. The servers' weights count as `policy_version` until a first update.
    """

    def __init__(
        self,
        cfg: SglangEngineConfig,
        *,
        served_model: ServedModel,
        policy_version: int = 0,
        sender: WeightSender,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`sender` is closed with the engine; `elsewhere`: servers of the run's other nodes, where they have some.

        Raises:
            ConfigError: neither `urls` nor `servers`, or both; what is wrong with either; a model that SGLang computes
                otherwise (`model_support`).
        """
        if bool(cfg.urls) == (cfg.servers is not None):
            raise ConfigError(
                "rollout.engine (sglang) needs either urls, of servers that run, such as "
                '["http://127.0.0.1:30000"], or servers, to launch some; it has ' + ("both" if cfg.urls else "neither")
            )
        check_model(cfg, served_model.path)
        self._cfg = cfg
        self._model = served_model
        self._first_version = policy_version
        self._wants_routes = wants_routes(cfg, served_model)
        self._sender = sender
        self._launched: Launched | None = None
        self._restarts: Restarts | None = None
        self._found: Sequence[Server] = self._find_servers(elsewhere)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bridge: Bridge | None = None
        self._starting: concurrent.futures.Future[None] | None = None
        self._closed = False
        self._clients: list[SglangClient] = []
        self._dispatcher: Dispatcher | None = None
        self._updates: Updates | None = None
        self._watch: Watch | None = None
        self._differences = Differences()

    @property
    def policy_version(self) -> int:
        """Of the weights that are served."""
        return self._first_version if self._dispatcher is None else self._dispatcher.policy_version

    @property
    def max_concurrency(self) -> int:
        """Requests that all servers together get at once."""
        return self._cfg.requests_per_server * len(self._found)

    @property
    def stalled_seconds(self) -> float:
        """How long no server was fit, since the start."""
        return 0.0 if self._dispatcher is None else self._dispatcher.pool.seconds_without_fit

    def counts(self) -> dict[str, int]:
        """What happened since the start: `DispatchCounts`, and what became of servers."""
        if self._dispatcher is None:
            return {}
        members = self._dispatcher.pool.members
        return {
            **asdict(self._dispatcher.counts),
            "ejections": sum(member.num_ejections for member in members),
            "returns": sum(member.num_returns for member in members),
            "restarts": 0 if self._restarts is None else self._restarts.count,
        }

    def take_metrics(self) -> Metrics:
        """`engine/<count>` since the last call, and `engine/fit_servers`, those that serve now; {} before the start."""
        counts = self.counts()
        if self._dispatcher is None:
            return {}
        return {**self._differences.take(counts), "engine/fit_servers": Last(float(len(self._dispatcher.pool.fit)))}

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        """Continue `token_ids` [s]; while paused, or while every server is full, the request waits.

        Raises:
            RolloutError: a request that cannot be served, an answer that breaks the protocol, servers that failed too
                often, a closed engine, or released memory; names the request.
        """
        if self._closed:
            raise RolloutError(f"request {request_id}: the engine is closed")
        if self._dispatcher is None:
            await self._start()
        assert self._dispatcher is not None
        assert self._updates is not None
        if self._updates.is_released:
            raise RolloutError(f"request {request_id}: the servers' memory is released; take it again first")
        return await self._on_loop(self._dispatcher.generate(token_ids, params, request_id))

    async def abort(self, request_id: str) -> None:
        """End one request; `generate` returns what it has, with finish reason `abort`."""
        if self._dispatcher is not None and not self._closed:
            await self._on_loop(self._dispatcher.abort(request_id))

    async def pause(self) -> None:
        """Stop all servers, by `pause_mode`."""
        await self._on_loop((await self._ready()).pause())

    async def resume(self) -> None:
        """Go on; an update whose last bucket has not come is dropped."""
        await self._on_loop((await self._ready()).resume())

    async def update_weights(self, bucket: WeightBucket) -> None:
        """Take one bucket; the last one swaps the weights of every server, and the version rises.

        Raises:
            WeightSyncError: a damaged bucket, a version below the present one, a name sent twice, or no server took it.
        """
        await self._on_loop((await self._ready()).take(bucket))

    async def set_memory(self, *, released: bool) -> None:
        """Give cache and weights back, or take the weights' memory again; nothing is served until they came."""
        updates = await self._ready()
        await self._on_loop(self._release(updates) if released else updates.take_memory())

    def close(self) -> None:
        """Abort what runs, stop the servers that were launched here, end the thread. A second call does nothing."""
        with self._lock:
            is_first, self._closed = not self._closed, True
        if not is_first:
            return
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._launched is not None:
            self._launched.close()
        if self._thread is not None:
            self._thread.join()
        self._sender.close()

    def _find_servers(self, elsewhere: Elsewhere | None) -> Sequence[Server]:
        from moerl.rollout.sglang.nodes import Fleet
        from moerl.rollout.sglang.restarts import Restarts
        from moerl.rollout.sglang.servers import Among, attach

        if self._cfg.servers is None:
            return attach(self._cfg.urls, key_file=Path(self._cfg.key_file) if self._cfg.key_file else None)
        among = None if elsewhere is None else Among(elsewhere.key)
        self._launched = launched_here(self._cfg, self._model, self._first_version, among)
        if elsewhere is not None:
            self._launched = Fleet(self._launched, elsewhere.nodes)
        self._restarts = Restarts(self._launched, lambda: self._updates is not None and self._updates.is_released)
        return self._launched.servers

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RolloutError("the engine is closed")

    async def _ready(self) -> Updates:
        self._refuse_closed()
        await self._start()
        assert self._updates is not None
        return self._updates

    async def _start(self) -> None:
        """Once, whoever comes first; the others wait for it. A start that failed is tried again by the next call."""
        with self._lock:
            self._refuse_closed()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._bridge = Bridge(self._loop)
                self._thread = threading.Thread(
                    target=serve_loop, args=(self._loop,), name="sglang-engine", daemon=True
                )
                self._thread.start()
            if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
                self._starting = asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
            starting = self._starting
        if not starting.done() or starting.exception() is not None:
            await asyncio.shield(asyncio.wrap_future(starting))

    async def _connect(self) -> None:
        """As `_connect_once`; where that fails nothing of it is left, so that it can be tried again."""
        is_well = False
        try:
            await self._connect_once()
            is_well = True
        finally:
            if not is_well:
                clients, self._clients = self._clients, []
                for client in clients:
                    await client.close()
                if self._launched is not None:
                    await asyncio.to_thread(self._launched.stop)

    async def _connect_once(self) -> None:
        """Launch what is to be launched, and look at every server."""
        from moerl.rollout.sglang.client import ClientTimeouts, SglangClient
        from moerl.rollout.sglang.connection import allow_sockets
        from moerl.rollout.sglang.dispatcher import Dispatcher, DispatchSettings
        from moerl.rollout.sglang.updates import Updates
        from moerl.rollout.sglang.watch import Watch, WatchSettings
        from moerl.rollout.sglang.wire import Expected

        cfg, model = self._cfg, self._model
        allow_sockets(self.max_concurrency)
        if self._launched is not None:
            await asyncio.to_thread(self._launched.start)
        timeouts = ClientTimeouts(
            control_seconds=cfg.control_timeout_seconds, update_seconds=cfg.update_timeout_seconds
        )
        self._clients = [
            SglangClient(server.url, admin_key=server.admin_key, index=server.index, timeouts=timeouts)
            for server in self._found
        ]
        labels, infos = await look_at_servers(
            self._clients,
            self._first_version,
            needs_routes=self._wants_routes,
            needs_memory_saver=cfg.release_memory,
            is_sent_live=not self._sender.is_staged,
            longest_tokens=model.longest_tokens,
        )
        contexts = [info.context_length for info in infos if info.context_length is not None]
        dispatcher = Dispatcher(
            self._clients,
            settings=DispatchSettings(
                requests_per_server=cfg.requests_per_server,
                affinity_slack=cfg.affinity_slack,
                request_timeout_seconds=cfg.request_timeout_seconds,
                num_retries=cfg.num_retries,
                retry_wait_seconds=cfg.retry_wait_seconds,
                resume_aborted=cfg.resume_aborted,
            ),
            expected=Expected(model.layout if self._wants_routes else None, model.vocab_size, labels),
            context_length=min(contexts, default=None),
        )
        dispatcher.policy_version = self._first_version
        for member, info in zip(dispatcher.pool.members, infos, strict=True):
            dispatcher.pool.set_ranks(member, info.data_size)
        patience = cfg.no_server_seconds + (0.0 if self._launched is None else self._launched.start_seconds)
        self._updates = Updates(dispatcher, self._sender, pause_mode=cfg.pause_mode, wait_seconds=patience)  # pyright: ignore[reportArgumentType]
        self._watch = Watch(
            dispatcher,
            settings=WatchSettings(health_seconds=cfg.health_seconds, no_server_seconds=cfg.no_server_seconds),
            replay=self._updates.replay,
            regain=self._updates.regain,
            revive=self._revive if self._restarts is not None else None,
        )
        self._watch.start()
        self._dispatcher = dispatcher

    async def _release(self, updates: Updates) -> None:
        """Nothing is started from the first line on; what was being started has its memory at the third."""
        await updates.release_memory()
        if self._restarts is not None:
            await self._restarts.settle()
        await updates.release_rest()

    async def _revive(self, index: int, is_hung: bool) -> bool:
        if self._restarts is None or not await self._restarts.revive(index, is_hung=is_hung):
            return False
        if self._updates is not None:
            self._updates.note_restart(self._clients[index])
        return True

    async def _close(self) -> None:
        if self._watch is not None:
            await self._watch.close()
        assert self._bridge is not None
        self._bridge.shut()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._updates is not None and self._launched is None:  # those that were launched here are about to end
            await self._updates.give_back()
        if self._dispatcher is not None:
            await self._dispatcher.close()
        for client in self._clients:
            await client.close()
        self._bridge.flush()

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the engine's loop; cancelling here cancels it there."""
        assert self._bridge is not None
        try:
            return await self._bridge.run(coroutine)
        except RuntimeError as error:
            if self._closed:
                raise RolloutError("the engine is closed") from error
            raise
