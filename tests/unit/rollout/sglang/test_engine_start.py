"""The engine over servers that it launches: their start, their end, and what happens to them in between."""

from __future__ import annotations

import asyncio

import fake_sglang
import pytest
from fake_servers import LAYOUT

from moerl.rollout.engine import ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
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
