"""The benchmarks' own arithmetic, and a tiny run of the objective benchmark without peers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"


def load(name):
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


@pytest.mark.parametrize("size", [16, 18])
def test_lengths_add_up_to_the_tokens_and_one_answer_is_cut_off(size):
    batches = load("objective_batches")
    ragged = batches.lengths(2**size, "ln8192")
    assert sum(ragged) == 2**size
    assert max(ragged) == 8192
    assert batches.lengths(2**size, "eq1024") == [1024] * (2 ** (size - 10))
    batch = batches.make_batch(2**14, "ln8192")
    assert int(batch.mask.sum()) == 2**14
    assert (batch.old[~batch.mask] == 0).all()


def test_ratios_are_to_the_best_peer():
    tool = load("objective")
    row = {"threads": 1, "size": 16, "layout": "eq1024", "method": "grpo", "max": 9.0, "product": 1.0}
    rows = [
        {**row, "side": "moerl", "ms": 2.0, "min": 1.0, "extra_mb": 10.0, "copy": 0.5},
        {**row, "side": "trl", "ms": 8.0, "min": 6.0, "extra_mb": 40.0},
        {**row, "side": "verl", "ms": 5.0, "min": 4.0, "extra_mb": 50.0, "product": 1.1},
    ]
    table = tool.table(rows, 1)
    assert "| 4.0 x | 0.25 x | 2.0 x |" in table
    assert len(tool.disagreements(rows)) == 1
    assert "verl grpo" in tool.disagreements(rows)[0]
    assert "| - | - |" in tool.table(rows[:1], 1)


def test_rounds_of_one_measurement_become_one_row():
    tool = load("objective")
    about = {"side": "moerl", "threads": 1, "size": 16, "layout": "eq1024", "method": "grpo", "product": 1.0}
    figures = [(2.0, 1.0, 9.0, 30.0), (4.0, 1.5, 5.0, 20.0), (3.0, 0.5, 4.0, 25.0)]
    rounds = [{**about, "ms": a, "min": b, "max": c, "reps": 5, "extra_mb": d} for a, b, c, d in figures]
    (row,) = tool.merged(rounds)
    assert row == {**about, "ms": 3.0, "min": 0.5, "max": 9.0, "reps": 15, "extra_mb": 20.0}
    assert len(tool.merged([*rounds, {**rounds[0], "method": "gspo"}])) == 2


def test_a_run_without_peers_says_so():
    command = [sys.executable, str(BENCH / "objective.py"), "--sizes", "14", "--threads", "1", "--seconds", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trl: skipped (no --peer-python)" in done.stdout
    assert done.stdout.count("| 2^14 |") == 10


def test_the_demo_table_leaves_nothing_out():
    tool = load("demo")
    steps = [{"rollout": 1.0, "score": 0.5, "update": 2.0, "step": 4.0, "tokens": 100}]
    plain = [{"rollout": 3.0, "score": 1.0, "update": 3.0, "step": 8.0, "tokens": 100}]
    table = tool.table({"moerl": steps, "plain transformers": plain})
    assert "| 0.500 [0.500-0.500] | 4.000" in table  # other
    assert "100 [100-100] | 25 [25-25] | 0.50 x |" in table
