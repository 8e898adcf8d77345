"""The window of steps under the profiler, and the trace that it leaves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from moerl.telemetry.profiler import ProfileWindow


def walk(window: ProfileWindow, steps: range) -> None:
    """As the loop does; the product's size tells the step."""
    for step in steps:
        window.begin(step)
        with window.phase("update"):
            torch.ones(step, 4) @ torch.ones(4, 3)
        window.end(step)
    window.close()


def shapes(path: Path) -> set[int]:
    """Rows of the products in a trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert {event["name"] for event in events if str(event.get("name")).startswith("phase/")} == {"phase/update"}
    return {event["args"]["Input Dims"][0][0] for event in products}


def test_the_window_holds_its_steps_and_no_others(tmp_path: Path) -> None:
    window = ProfileWindow(tmp_path, rank=3, start_step=3, num_steps=2)
    assert window.path.name == "profile_steps_000003_000004_rank_00003.json.gz"
    walk(window, range(1, 7))
    assert shapes(window.path) == {3, 4}


def test_a_run_that_goes_on_or_ends_inside_the_window_leaves_what_it_did_of_it(tmp_path: Path) -> None:
    window = ProfileWindow(tmp_path, rank=0, start_step=3, num_steps=5)
    walk(window, range(4, 6))
    assert shapes(window.path) == {4, 5}


def test_without_a_window_nothing_is_written(tmp_path: Path) -> None:
    walk(ProfileWindow(tmp_path, rank=0, start_step=1, num_steps=0), range(1, 4))
    assert list(tmp_path.iterdir()) == []
