"""A run whose servers share the learner's devices: in which order their memory is lent and taken back."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from served_runs import SERVED, SMALL

from moerl.build import build_run
from moerl.configure import load
from moerl.errors import MoerlError, NumericsError
from moerl.loop import train
from moerl.rollout.fake_engine.serving import FakeServer

STEP = [
    "/pause_generation",
    "/flush_cache",
    "/update_weight_version",
    "/release_memory_occupation",
    "learns",
    "makes room",
    "/resume_memory_occupation",
    "/pause_generation",
    "/update_weights_from_disk",
    "/resume_memory_occupation",
    "/update_weight_version",
    "/flush_cache",
    "/continue_generation",
]


def test_memory_is_lent_after_the_rollout_and_taken_back_weights_first(tmp_path, monkeypatch):
    with FakeServer(replace(SERVED, memory_saver=True)) as server:
        engine = json.dumps({"name": "sglang", "urls": [server.url], "release_memory": True})
        place = [f"rollout.engine={engine}", f"run.output_dir={tmp_path}", "run.name=run"]
        run = build_run(load("configs/demo/gspo.yaml", [*SMALL, "run.num_steps=2", *place]))
        assert run is not None
        update = run.rooms.policy.update

        def learns(batch, objective):
            assert server.state()["released"] == ["kv_cache", "weights"]
            assert server.state()["running"] == []
            server.call(lambda app: app.state.calls.append("learns"))
            return update(batch, objective)

        def makes_room():  # or what learning took at its peak would stay with the learner's allocator
            server.call(lambda app: app.state.calls.append("makes room"))

        run.rooms.policy.update = learns
        monkeypatch.setattr(torch.cuda, "empty_cache", makes_room)
        try:
            train(run.rooms, run.schedule, run.resume_from)
        finally:
            run.close()
        calls = [call for call in server.state()["calls"] if call not in ("/health", "/weights_checker")]
        assert calls[calls.index(STEP[3]) - 3 :] == STEP * 2
        assert server.state()["released"] == []
        assert server.state()["label"] == "2"


def test_a_run_on_a_server_that_lends_to_a_run_that_ended_does_nothing(tmp_path):
    with FakeServer(replace(SERVED, memory_saver=True)) as server:
        server.call(lambda app: app.state.note_update(b"", "lent-0123abcd"))
        server.call(lambda app: app.state.released.update(("kv_cache", "weights")))
        engine = json.dumps({"name": "sglang", "urls": [server.url], "release_memory": True})
        place = [f"rollout.engine={engine}", f"run.output_dir={tmp_path}", "run.name=run"]
        run = build_run(load("configs/demo/gspo.yaml", [*SMALL, *place]))
        assert run is not None
        words = f"server {server.url} still lends its memory to a run that ended .*: restart that server"
        try:
            with pytest.raises(MoerlError, match=words):
                train(run.rooms, run.schedule, run.resume_from)
        finally:
            run.close()
        assert server.state()["calls"] == []
        assert set(server.state()["counts"]) == {"/model_info"}
        assert server.state()["num_restarts"] == 0


@contextlib.contextmanager
def one_step(folder, name, server):
    """A run over a server that it attaches to, built; it is closed at the end."""
    engine = json.dumps({"name": "sglang", "urls": [server.url], "release_memory": True})
    place = [f"rollout.engine={engine}", f"run.output_dir={folder}", f"run.name={name}", "run.num_steps=1"]
    run = build_run(load("configs/demo/gspo.yaml", [*SMALL, *place]))
    assert run is not None
    try:
        yield run
    finally:
        run.close()


def test_a_learner_that_fails_while_memory_is_lent_leaves_servers_that_another_run_can_use(tmp_path):
    with FakeServer(replace(SERVED, memory_saver=True)) as server:

        def fails(batch, objective):
            assert server.state()["released"] == ["kv_cache", "weights"]
            raise NumericsError("the loss is not finite")

        with one_step(tmp_path, "first", server) as run:
            run.rooms.policy.update = fails
            with pytest.raises(NumericsError, match="step 1: the loss is not finite"):
                train(run.rooms, run.schedule, run.resume_from)
        assert server.state()["released"] == []
        with one_step(tmp_path, "second", server) as run:
            train(run.rooms, run.schedule, run.resume_from)
        assert server.state()["released"] == []
        assert (server.state()["label"], server.state()["num_restarts"]) == ("1", 0)
