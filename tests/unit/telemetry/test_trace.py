"""trace.json: whole JSON after every event, lanes without overlap, bounded, repaired, never the run's end."""

from __future__ import annotations

import itertools
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.telemetry.trace import LEARNER, PHASES, ROLLOUT, Trace


def events(folder, name: str = "trace.json"):
    return [event for event in json.loads((folder / name).read_text()) if event["ph"] == "X"]


def make(folder, max_bytes: int = 1 << 20, now: float = 0.0) -> Trace:
    return Trace(folder, max_bytes, clock=lambda: now)


def test_the_file_loads_after_every_event(tmp_path):
    trace = make(tmp_path)
    assert list(tmp_path.iterdir()) == [], "made with the first event"
    for i in range(5):
        trace.phase("update", i, i + 0.5)
        assert len(events(tmp_path)) == i + 1
    trace.close()
    last = events(tmp_path)[-1]
    assert (last["name"], last["pid"], last["tid"], last["dur"]) == ("update", LEARNER, PHASES, 500_000)
    assert [b["ts"] - a["ts"] for a, b in zip(events(tmp_path), events(tmp_path)[1:], strict=False)] == [1_000_000] * 4
    trace.phase("late", 9, 10)
    assert len(events(tmp_path)) == 5, "closed"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=20))
def test_groups_on_one_lane_do_not_overlap_and_lanes_are_as_few_as_overlap_at_once(tmp_path_factory, spans):
    folder = tmp_path_factory.mktemp("trace")
    trace = make(folder)
    ended = sorted(((start, start + length) for start, length in spans), key=lambda span: span[1])
    for start, end in ended:
        trace.group("p/0", start, end, {"step": 1})
    trace.close()
    found = [event for event in events(folder) if event["pid"] == ROLLOUT]
    lanes = {event["tid"] for event in found}
    for lane in lanes:
        mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in found if event["tid"] == lane)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
    assert len(found) == len(spans)
    at_once = max(sum(start <= moment < end for start, end in ended) for moment in range(40))
    assert lanes == set(range(at_once))


def test_a_run_that_goes_on_adds_to_its_file(tmp_path):
    for i in range(3):
        trace = make(tmp_path)
        trace.step(i, 0, 1)
        trace.close()
    assert [event["name"] for event in events(tmp_path)] == ["step 0", "step 1", "step 2"]


@pytest.mark.parametrize("tail", [b"", b',\n{"name": "to', b"\n]", b",\n\xff\xfe", b",\n"])
def test_a_torn_end_is_cut_off(tmp_path, tail):
    trace = make(tmp_path)
    trace.step(1, 0, 1)
    trace.close()
    path = tmp_path / "trace.json"
    path.write_bytes(path.read_bytes().removesuffix(b"\n]\n") + tail)
    trace = make(tmp_path)
    trace.step(2, 1, 2)
    trace.close()
    assert [event["name"] for event in events(tmp_path)] == ["step 1", "step 2"]


@pytest.mark.parametrize("content", [b"", b"[", b"no trace at all", b"{}\n"])
def test_what_is_no_trace_is_begun_anew(tmp_path, content):
    (tmp_path / "trace.json").write_bytes(content)
    trace = make(tmp_path)
    trace.step(1, 0, 1)
    trace.close()
    assert [event["name"] for event in events(tmp_path)] == ["step 1"]


def test_its_size_is_bounded(tmp_path):
    bound = 4000
    trace = make(tmp_path, bound)
    for i in range(300):
        trace.group(f"p/{i}", i, i + 0.5, {"step": i})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * bound + 500
    trace.close()
    names = [event["name"] for event in (*events(tmp_path, "trace.1.json"), *events(tmp_path))]
    assert names == [f"p/{i}" for i in range(300 - len(names), 300)], "the newest, without a gap"


def test_nothing_is_written_where_it_is_off(tmp_path):
    trace = make(tmp_path, 0)
    trace.step(1, 0, 1)
    trace.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "trace.json").mkdir()
    trace = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        trace.step(1, 0, 1)
        trace.step(2, 1, 2)
    assert len(caplog.records) == 1
    assert "trace.json: cannot be written (Is a directory); the run goes on without it" in caplog.text
