from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.errors import ConfigError, MoerlError
from moerl.telemetry.sinks import NON_FINITE, JsonlSink, LoadSink, PassRateSink, Sinks, WandbSink, sample_record
from moerl.types import Prompt, Trajectory


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_floats_read_back_exactly_and_keys_are_sorted(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    values = {"reward/mean": 0.1 + 0.2, "mm/k3": 1.2345678901234567e-13, "a": float(np.float32(0.1)), "n": 3}
    sink.log(1, values)
    sink.log(2, dict(reversed(values.items())))
    sink.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert _rows(tmp_path / "metrics.jsonl")[0] == {"step": 1, **values}
    assert lines[0].replace('"step": 1', '"step": 2') == lines[1]
    assert list(json.loads(lines[0])) == ["step", *sorted(values)]


def test_values_that_are_not_finite_become_null_and_are_counted(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.log(1, {"x": float("nan"), "y": float("inf"), "z": 1.0})
    sink.log(2, {"z": 1.0})
    sink.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert _rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, NON_FINITE: 2, "x": None, "y": None, "z": 1.0},
        {"step": 2, "z": 1.0},
    ]
    assert sink.num_non_finite == 2


def test_resume_removes_the_records_that_will_be_written_again(tmp_path: Path) -> None:
    sink, loads, rates = JsonlSink(tmp_path), LoadSink(tmp_path), PassRateSink(tmp_path)
    for step in range(5):
        sink.log(step, {"x": float(step)})
        sink.log_samples(step, [{"prompt": "p"}, {"prompt": "q"}])
        loads.log(step, [[0.5, 0.5], [1.0, 0.0]])
        rates.log(step, [("a/0", 8, step), ("a/1", 8, 0)])
    sink.close()
    loads.close()
    rates.close()
    again = JsonlSink(tmp_path, resume_step=3)
    again.log(3, {"x": 33.0})
    again.close()
    LoadSink(tmp_path, resume_step=3).close()
    PassRateSink(tmp_path, resume_step=3).close()
    assert [(row["step"], row["x"]) for row in _rows(tmp_path / "metrics.jsonl")] == [(0, 0), (1, 1), (2, 2), (3, 33)]
    assert [row["step"] for row in _rows(tmp_path / "samples.jsonl")] == [0, 0, 1, 1, 2, 2]
    assert _rows(tmp_path / "load.jsonl")[-1] == {"step": 2, "load": [[0.5, 0.5], [1.0, 0.0]]}
    table = _rows(tmp_path / "pass_rates.jsonl")
    assert len(table) == 6
    assert table[4] == {"step": 2, "prompt_id": "a/0", "answers": 8, "passed": 2}


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_record_takes_the_place_of_the_one_that_its_step_has(tmp_path: Path, is_reopened: bool) -> None:
    sink = JsonlSink(tmp_path)
    for step in range(3):
        sink.log(step, {"x": float(step)})
        sink.log_samples(step, [{"prompt": "p"}])
    if is_reopened:
        sink.close()
        sink = JsonlSink(tmp_path, resume_step=3)
    sink.log(2, {"x": 2.0, "y": 5.0})
    sink.log(3, {"x": 3.0})
    sink.close()
    rows = _rows(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 0, "x": 0}, {"step": 1, "x": 1}, {"step": 2, "x": 2, "y": 5}, {"step": 3, "x": 3}]
    assert [row["step"] for row in _rows(tmp_path / "samples.jsonl")] == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 3, "x": 1.', '{"step": 3', "{", '{"step": 3, "x": 1.0}'])
def test_a_torn_last_line_is_removed_and_a_whole_one_kept(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1.0}\n{"step": 2, "x": 2.0}\n' + torn)
    sink = JsonlSink(tmp_path)
    sink.log(4, {"x": 4.0})
    sink.close()
    kept = [3] if torn.endswith("}") else []
    assert [row["step"] for row in _rows(path)] == [1, 2, *kept, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_a_process_killed_at_any_moment_leaves_at_most_one_torn_line(tmp_path: Path) -> None:
    writer = (
        "import sys; from pathlib import Path; from moerl.telemetry.sinks import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1])); step = 0\n"
        "while True:\n"
        "    sink.log(step, {f'metric/{i}': step / 7 for i in range(200)}); step += 1\n"
    )
    process = subprocess.Popen([sys.executable, "-c", writer, str(tmp_path)])
    path = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while (not path.exists() or path.stat().st_size < 200_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    JsonlSink(tmp_path).close()
    rows = _rows(path)
    assert len(rows) > 20
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all(len(row) == 201 for row in rows)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_a_full_disk_says_what_to_free_and_that_the_checkpoint_is_safe(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sink = Sinks([JsonlSink(tmp_path)])
    with pytest.raises(MoerlError) as caught:
        sink.log(1, {"x": 1.0})
    message = str(caught.value)
    assert "metrics.jsonl: the disk is full (No space left on device" in message
    assert f"checkpoint in {tmp_path} is safe" in message
    assert f"old runs in {tmp_path.parent}" in message
    assert "start the same command again" in message


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoerlError, match=r"file/run/metrics.jsonl: cannot be written \(Not a directory\)"):
        JsonlSink(tmp_path / "file" / "run")


class _Broken:
    """Keeps the protocol until its second record."""

    def __init__(self) -> None:
        self.count = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.count += 1
        if self.count > 1:
            raise RuntimeError("network gone")

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.count += 100

    def close(self) -> None:
        raise OSError("cannot flush")


def test_a_sink_that_fails_is_dropped_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = _Broken()
    sinks = Sinks([broken, JsonlSink(tmp_path)])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sinks.log(step, {"x": 1.0})
    assert sinks.names == ["JsonlSink"]
    assert broken.count == 2
    assert caplog.messages == ["_Broken failed and is dropped for the rest of the run: RuntimeError('network gone')"]
    sinks.log_samples(2, [{"prompt": "p"}])
    sinks.close()
    assert broken.count == 2
    assert len(_rows(tmp_path / "metrics.jsonl")) == 3


def test_a_failing_close_does_not_keep_the_others_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file_sink = JsonlSink(tmp_path)
    Sinks([_Broken(), file_sink]).close()
    assert "cannot flush" in caplog.text
    with pytest.raises(ValueError, match="closed file"):
        file_sink.log(1, {"x": 1.0})


def _trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "token_ids": np.arange(5, dtype=np.int32),
        "loss_mask": np.array([False, False, True, True, True]),
        "rollout_logprobs": np.zeros(5, dtype=np.float32),
        "temperature": 1.0,
        "finish_reason": "stop",
        "version_spans": ((2, 5, 0),),
        "response_text": "7 \ud800 \u2028 é",
        "reward": 1.0,
        "reward_components": {"exact": 1.0},
    }
    return Trajectory(**(fields | changes))


def test_samples_are_readable_and_any_text_survives(tmp_path: Path) -> None:
    prompt = Prompt("sum/3", np.arange(2, dtype=np.int32), "7", "sum", metadata={"text": "3+4=?"})
    failed = _trajectory(status="error", error="verifier timed out", reward=float("nan"), reward_components={})
    sink = JsonlSink(tmp_path)
    sink.log_samples(4, [sample_record(prompt, _trajectory()), sample_record(prompt, failed)])
    sink.close()
    good, bad = _rows(tmp_path / "samples.jsonl")
    assert good == {
        "step": 4,
        "prompt_id": "sum/3",
        "prompt": "3+4=?",
        "response": "7 ? \u2028 é",
        "answer": "7",
        "reward": 1.0,
        "components": {"exact": 1.0},
        "length": 3,
        "finish_reason": "stop",
        "status": "ok",
    }
    assert (bad["reward"], bad["status"], bad["error"]) == (None, "error", "verifier timed out")


def test_wandb_mode_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.wandb\.mode is 'on'; allowed: offline, online"):
        WandbSink(tmp_path, run_name="r", config={}, mode="on")
