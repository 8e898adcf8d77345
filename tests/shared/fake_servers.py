"""Fake SGLang servers, and what tests expect of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import orjson

from moerl.rollout.engine import RouteLayout
from moerl.rollout.fake_engine.model import FakeModel
from moerl.rollout.fake_engine.running import Running
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.client import ClientTimeouts, SglangClient
from moerl.rollout.sglang.dispatcher import Dispatcher, DispatchSettings
from moerl.rollout.sglang.watch import Replay, Revive, Watch, WatchSettings
from moerl.rollout.sglang.wire import Expected, WireRequest, payload, read_answer
from moerl.types import SamplingParams

LAYOUT = RouteLayout(num_layers=3, moe_layers=(0, 1, 2), experts_per_token=2, num_experts=8)
EXPECTED = Expected(LAYOUT, vocab_size=320, labels={"default": 0})
SLOW = FakeEngineConfig(token_seconds=0.01)
QUICK_WATCH = WatchSettings(health_seconds=0.2, first_probe_seconds=0.02, longest_probe_seconds=0.1)


def prompt_of(length: int, first: int = 2) -> np.ndarray:
    """[length] int32, none of them the end token."""
    return np.arange(first, first + length, dtype=np.int32)


def wire_request(prompt: int = 4, budget: int = 3, routes_from: int | None = 0, **params: Any) -> WireRequest:
    return WireRequest("a-1", prompt_of(prompt), SamplingParams(budget, seed=7, **params), routes_from)


def should_sample(
    prompt: np.ndarray, count: int, *, seed: int, label: str = "default", cfg: FakeEngineConfig | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids [count], logprobs [count] and routes [p + count - 1, l, k] that a fake server gives by one version."""
    model = FakeModel(cfg or FakeEngineConfig())
    ids, logprobs = model.tokens(label, model.key(seed, len(prompt)), len(prompt), count)
    routes = model.routes(label, np.concatenate([prompt, ids])[:-1], 0)
    return ids, logprobs, routes


@contextlib.asynccontextmanager
async def dispatching(
    servers: Sequence[FakeServer],
    *,
    watch: bool = False,
    replay: Replay | None = None,
    revive: Revive | None = None,
    expected: Expected = EXPECTED,
    watch_settings: WatchSettings = QUICK_WATCH,
    health_seconds: float = 5.0,
    control_seconds: float = 20.0,
    **settings: Any,
) -> AsyncIterator[Dispatcher]:
    """A dispatcher over `servers`, closed at the end, with retries that do not wait long."""
    timeouts = ClientTimeouts(
        connect_seconds=5.0,
        control_seconds=control_seconds,
        update_seconds=control_seconds,
        health_seconds=health_seconds,
    )
    clients = [SglangClient(server.url, index=i, timeouts=timeouts) for i, server in enumerate(servers)]
    given = {"retry_wait_seconds": 0.01, **settings}
    dispatcher = Dispatcher(clients, settings=DispatchSettings(**given), expected=expected)
    looks_after = Watch(dispatcher, settings=watch_settings, replay=replay, revive=revive)
    if watch:
        looks_after.start()
    try:
        yield dispatcher
    finally:
        await looks_after.close()
        await dispatcher.close()
        for client in clients:
            await client.close()


async def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait until it holds.

    Raises:
        TimeoutError: it does not, after `seconds`.
    """
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


SERVER = "http://127.0.0.1:1"


def said_to(request: WireRequest, cfg: FakeEngineConfig | None = None) -> dict:
    """What the fake server would say, parsed from its JSON."""
    model = FakeModel(cfg or FakeEngineConfig())
    running = Running(request.rid, request.token_ids.tolist(), payload(request), model, "default", 0)
    running.started, running.is_admitted = 0.0, True
    running.settle(1.0)
    return orjson.loads(orjson.dumps(running.answer("default")))


def read_by_hand(answer, request, expected=EXPECTED):
    return read_answer(answer, request, expected, server=SERVER)
