"""The engine over servers that it launches: their start, their end, and what happens to them in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time

import fake_sglang
import pytest
from fake_servers import LAYOUT, prompt_of

from moerl.errors import RolloutError
from moerl.protocols import Stalling
from moerl.rollout.engine import ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.sglang.restarts import Restarts
from moerl.types import SamplingParams
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender


@pytest.fixture
def launching(tmp_path):
    """A factory of engines over servers of their own, closed after the test."""
    (tmp_path / "config.json").write_text("{}")
    python, made = fake_sglang.make_python(tmp_path), []

    def build(**fields):
        cfg = SglangEngineConfig(servers={"python": str(python), "stop_seconds": 1.0, **fields})
        model = ServedModel(tmp_path, tmp_path, 320, LAYOUT, wants_routes=False)
        sender = DiskSender(DiskConfig(), SenderPlace(tmp_path / "engine_weights", tmp_path))
        made.append(SglangEngine(cfg, served_model=model, sender=sender))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def test_a_server_that_hangs_is_started_anew_and_one_that_lives_is_left(launching, tmp_path):
    engine = launching()
    engine._launched.start()
    first = fake_sglang.pids(tmp_path)[0]
    asyncio.run(engine._revive(0, False))
    assert fake_sglang.pids(tmp_path)[0] == first
    asyncio.run(engine._revive(0, True))
    assert fake_sglang.pids(tmp_path)[0] != first
    assert not fake_sglang.is_alive(first)


def test_a_server_that_lives_is_not_kept_waiting_while_another_starts():
    """Before, one that was ready to come back stood behind the start of the other, minutes long."""

    class Launched:
        def __init__(self) -> None:
            self.begun, self.may_end = threading.Event(), threading.Event()

        def dead(self) -> dict[int, str]:
            return {0: "it was killed"}

        def restart(self, index: int) -> None:
            assert index == 0
            self.begun.set()
            assert self.may_end.wait(60)

    launched = Launched()
    restarts = Restarts(launched, lambda: False)  # pyright: ignore[reportArgumentType]

    async def main():
        starts = asyncio.create_task(restarts.revive(0, is_hung=False))
        try:
            await asyncio.to_thread(launched.begun.wait, 60)
            assert not await asyncio.wait_for(restarts.revive(1, is_hung=False), 20)
            assert not starts.done()
        finally:
            launched.may_end.set()
        assert await starts
        assert restarts.count == 1

    asyncio.run(main())


def test_closing_while_servers_start_leaves_no_thread_behind(launching, tmp_path, monkeypatch):
    """Such a thread is waited for when the process ends: Ctrl-C would seem to hang."""
    monkeypatch.setenv("FAKE_SGLANG", "never")
    before = set(threading.enumerate())
    engine = launching(start_seconds=900.0)
    asked = threading.Thread(target=ask_and_forget, args=(engine,), daemon=True)
    asked.start()
    wait_for(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    engine.close()
    wait_for(lambda: not set(threading.enumerate()) - before)


def ask_and_forget(engine):
    with contextlib.suppress(RolloutError, asyncio.CancelledError, concurrent.futures.CancelledError):
        asyncio.run(engine.generate(prompt_of(5), SamplingParams(3), "p#0"))


def wait_for(condition):
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_log_that_cannot_be_opened_is_an_error_that_the_watch_survives(launching, tmp_path):
    engine = launching()
    (tmp_path / "sglang-0.log").mkdir()
    with pytest.raises(
        RolloutError, match=r"cannot open the server's log, .*sglang-0.log \(Is a directory\); make room"
    ):
        engine._launched.start()
    with pytest.raises(RolloutError, match="cannot open the server's log"):
        asyncio.run(engine._revive(0, True))


def test_a_start_that_failed_says_why_each_time_and_can_be_tried_again(launching, tmp_path, monkeypatch):
    """The fake program knows /health alone, so the look at the servers fails after they came up."""
    engine = launching()
    for _ in range(2):
        with pytest.raises(RolloutError, match="/model_info: an answer that is no JSON"):
            asyncio.run(engine.generate(prompt_of(5), SamplingParams(3), "p#0"))
        assert not any(fake_sglang.is_alive(pid) for pid in fake_sglang.pids(tmp_path))
        assert engine._clients == []


def test_a_closed_engine_starts_nothing_and_waits_for_nothing(tmp_path):
    with FakeServer() as server:
        cfg = SglangEngineConfig(urls=[server.url])
        sender = DiskSender(DiskConfig(), SenderPlace(tmp_path / "engine_weights", tmp_path))
        model = ServedModel(tmp_path, tmp_path, 320, LAYOUT, wants_routes=False)
        engine = SglangEngine(cfg, served_model=model, sender=sender)
        assert isinstance(engine, Stalling)
        assert engine.stalled_seconds == 0
        asyncio.run(engine.generate(prompt_of(5), SamplingParams(3), "p#0"))
        assert engine.stalled_seconds == 0
        loop = engine._loop
        engine.close()
        assert loop.is_closed()
        asyncio.run(asyncio.wait_for(engine.abort("p#0"), 20))
        for call in (engine.pause, engine.resume, lambda: engine.set_memory(released=True), engine._start):
            with pytest.raises(RolloutError, match="the engine is closed"):
                asyncio.run(asyncio.wait_for(call(), 20))
