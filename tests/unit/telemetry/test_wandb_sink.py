"""The wandb sink, offline, read back from wandb's own file (LevelDB log framing around protobuf records)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moerl.telemetry.sinks import Sinks, WandbSink

wandb = pytest.importorskip("wandb", reason="wandb is optional: pip install wandb")

_BLOCK = 32768
_HEADER = 7


def _records(path: Path) -> Iterator[bytes]:
    raw = path.read_bytes()
    position, parts = _HEADER, b""
    while position + _HEADER <= len(raw):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[position : position + _HEADER])
        data = raw[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        parts = data if kind in (1, 2) else parts + data
        if kind in (1, 4):
            yield parts


def _read_back(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from wandb.proto import wandb_internal_pb2

    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for data in _records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return config, history


def test_offline_run_has_config_metrics_and_samples(tmp_path: Path) -> None:
    sink = WandbSink(tmp_path, run_name="demo", config={"run": {"seed": 3}}, project="p")
    sinks = Sinks([sink])
    sinks.log(0, {"eval/accuracy_greedy": 0.15})
    for step in range(1, 11):
        sinks.log(step, {"reward/mean": step / 10, "bad": float("nan")})
        sinks.log_samples(step, [{"prompt": "1+1=?", "response": "2", "reward": 1.0}])
    assert sinks.names == ["WandbSink"]
    sinks.close()
    config, history = _read_back(tmp_path)
    assert config["run"] == {"seed": 3}
    rewards = {row["_step"]: row["reward/mean"] for row in history if "reward/mean" in row}
    assert rewards == {step: step / 10 for step in range(1, 11)}
    assert history[0]["eval/accuracy_greedy"] == 0.15
    assert not any("bad" in row for row in history)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json")
    assert json.loads(table.read_text())["data"] == [["1+1=?", "2", "1.0"]]
