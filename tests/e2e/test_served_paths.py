"""Paths that a server reports are those of its own disk: a run opens none of them."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from served_runs import SERVED, served

from moerl.rollout.fake_engine.server_state import ServerState
from moerl.rollout.fake_engine.serving import FakeServer

POLICY = Path("configs/demo/policy")
ANY_USE = 0x00000FFF
"""Of inotify: opened, read, closed, and all else but a look at what `stat` tells."""


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """The kernel itself says who opens the folder or a file in it, whatever library does."""
    libc = ctypes.CDLL(None, use_errno=True)
    events = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(events, os.fsencode(folder), ANY_USE) >= 0, os.strerror(ctypes.get_errno())
    try:
        yield
        try:
            seen = os.read(events, 1 << 16)
        except BlockingIOError:
            seen = b""
        assert seen == b"", "it was opened"
    finally:
        os.close(events)


def test_the_watch_sees_what_opens(tmp_path: Path) -> None:
    shutil.copytree(POLICY, tmp_path / "other")
    for use in (
        os.listdir,
        lambda folder: (folder / "config.json").read_bytes(),
        lambda folder: (folder / "x").touch(),
    ):
        is_seen = False
        try:
            with untouched(tmp_path / "other"):
                use(tmp_path / "other")
        except AssertionError:
            is_seen = True
        assert is_seen


def test_what_a_server_says_of_its_disk_is_never_opened(tmp_path: Path) -> None:
    """A whole model lies there, so that nothing would fail that read it."""
    canary = tmp_path / "canary"
    shutil.copytree(POLICY, canary)

    class Boasting(ServerState):
        """Serves the folder, whatever it was told to load."""

        model_path = property(lambda self: str(canary), lambda self, path: None)

    with FakeServer(SERVED) as server:
        server.call(lambda app: setattr(app.state, "__class__", Boasting))

        def trouble(step: int, groups: Any) -> None:
            if step == 2 and groups is not None:
                server.restart(0.3)

        with untouched(canary):
            served(tmp_path / "run", [server.url], watcher=trouble)
        assert server.call(lambda app: app.state.model_path) == str(canary)
        state = server.state()
    assert state["counts"]["/model_info"] > 1
    assert (state["num_restarts"], state["label"]) == (1, "3")
