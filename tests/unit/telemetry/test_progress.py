from __future__ import annotations

import io
import logging
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from moerl.errors import ConfigError
from moerl.telemetry.progress import Progress

VALUES = {
    "reward/mean": 0.8125,
    "eval/accuracy_greedy": 0.94,
    "pg/kl_old": 1.3e-4,
    "perf/rollout_tokens_per_second": 28123.4,
    "pg/something_else": 1.0,
}


def _plain(mode: str = "auto") -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(3, 1, mode, console=Console(file=out, width=40)), out


def test_not_a_terminal_gets_one_line_per_step_however_narrow() -> None:
    progress, out = _plain()
    with progress:
        progress.phase("rollout")
        progress.step(0, {"eval/accuracy_greedy": 0.15})
        progress.step(1, VALUES)
        progress.message("saved [bold]checkpoints/1[/bold]")
        progress.step(3, {})
    lines = out.getvalue().splitlines()
    assert progress.mode == "plain"
    assert lines[0] == "step 0/3  accuracy 0.150"
    assert lines[1].startswith("step 1/3  reward 0.812  accuracy 0.940  KL 1.3e-04  rollout tok/s 28,123  left 0:00:0")
    assert lines[2:] == ["saved [bold]checkpoints/1[/bold]", "step 3/3"]


def test_off_is_silent_and_an_unknown_mode_is_refused() -> None:
    progress, out = _plain("off")
    with progress:
        progress.step(1, VALUES)
        progress.message("x")
    assert out.getvalue() == ""
    with pytest.raises(ConfigError, match=r"telemetry\.progress is 'fancy'; allowed: auto, live, plain, off"):
        _plain("fancy")


def test_live_shows_step_phase_values_and_keeps_the_last_accuracy() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with Progress(10, 4, console=console) as progress:
        assert progress.mode == "live"
        progress.step(4, VALUES)
        progress.step(5, {"reward/mean": 0.5})
        progress.phase("publish")
        progress.message("a line above")
        time.sleep(0.3)
    last = out.getvalue().rpartition("step")[2]
    assert "5/10" in last
    assert "50 %" in last
    assert "accuracy 0.940" in last
    assert "reward 0.500" in last
    assert "28,123" not in last
    assert "publish" in out.getvalue()
    assert "a line above" in out.getvalue()


def _fail_inside(progress: Progress, handler: logging.StreamHandler[Any]) -> None:
    with progress:
        assert handler.stream is not sys.__stderr__
        _ = 1 / 0


def test_log_handlers_get_their_stream_back_also_after_an_error() -> None:
    handler = logging.StreamHandler(sys.__stderr__)
    logging.getLogger().addHandler(handler)
    console = Console(file=io.StringIO(), force_terminal=True)
    try:
        with pytest.raises(ZeroDivisionError):
            _fail_inside(Progress(3, mode="live", console=console), handler)
        assert handler.stream is sys.__stderr__
    finally:
        logging.getLogger().removeHandler(handler)


def test_a_reader_that_goes_away_does_not_stop_the_run() -> None:
    program = (
        "import sys\n"
        "from moerl.telemetry.progress import Progress\n"
        "with Progress(5000) as progress:\n"
        "    for step in range(1, 5001):\n"
        "        progress.step(step, {'reward/mean': 0.5})\n"
        "sys.stderr.write('finished')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b"step 1/5000  reward 0.500")
    process.stdout.close()
    assert process.stderr.read() == b"finished"
    assert process.wait() == 0
