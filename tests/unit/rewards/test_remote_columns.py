"""Columns that the remote reward is told to send: what JSON cannot say is refused when the data loads."""

from __future__ import annotations

import dataclasses
import datetime
import decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from moerl.build_rollout import load_data
from moerl.configure import load
from moerl.errors import DataError
from moerl.rewards.remote import Remote, RemoteConfig
from moerl.types import Prompt

PROMPT = Prompt("d/1", np.array([1], np.int32), "42", "d", metadata={"text": "6*7?", "level": 3})
AWKWARD = {
    "bytes": (b"\x00", "bytes is not JSON serializable"),
    "datetime": (datetime.datetime(2024, 1, 2), "datetime is not JSON serializable"),
    "Decimal": (decimal.Decimal("1.5"), "Decimal is not JSON serializable"),
    "int64": (np.int64(3), "int64 is not JSON serializable"),
    "list": ([{"at": b""}], "bytes is not JSON serializable"),
    "float": (float("nan"), "not JSON compliant"),
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_a_column_that_json_cannot_say_is_refused_at_the_start(kind):
    """Every episode would fail."""
    value, why = AWKWARD[kind]
    remote = Remote(RemoteConfig(url="http://127.0.0.1:1/score", send=["level", "odd"]), None)  # pyright: ignore[reportArgumentType]
    (told,) = remote.check([dataclasses.replace(PROMPT, metadata={"level": 3, "odd": value})])
    assert told is not None
    assert told.startswith(f"column odd holds a {kind}, which the reward remote is told to send but JSON cannot say (")
    assert why in told
    assert told.endswith("write it as text, numbers, lists or objects of them in the file, or leave it out of `send`")
    plain = dataclasses.replace(PROMPT, metadata={"level": None, "odd": {"a": [1, 2.5, "x", True]}})
    assert remote.check([plain]) == [None]


def test_such_a_column_is_named_with_file_and_row_when_the_data_loads(tmp_path):
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1), "when": datetime.datetime(2024, 1, 2)} for i in range(3)]
    path = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    settings = (
        f"data.train=[{{name: sum, source: {{name: file, path: {path}}}}}]",
        "evaluation.sets=[]",
        "reward.rewards=[{name: remote, url: 'http://127.0.0.1:1/score', send: [when]}]",
    )
    with pytest.raises(DataError, match=rf"{path}:row 1: reward remote: column when holds a datetime, .*`send`"):
        load_data(load("configs/demo/gspo.yaml", settings))
