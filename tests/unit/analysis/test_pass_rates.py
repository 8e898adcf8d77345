"""The pass-rate table of a run: per prompt, per step, and what of it the report shows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moerl.analysis.pass_rates import MAX_COLUMNS, by_prompt, rate_map, telling
from moerl.analysis.report import render_report
from moerl.analysis.run_folder import is_visit, read_run


def visit(step, name, passed, answers=4):
    return {"step": step, "prompt_id": name, "answers": answers, "passed": passed}


ROWS = [
    visit(1, "up", 1),
    visit(1, "down", 4),
    visit(2, "never", 0),
    visit(2, "unscored", 0, answers=0),
    visit(3, "up", 3),
    visit(3, "down", 3),
    visit(4, "up", 4),
    visit(4, "never", 0, answers=2),
]


def test_one_row_for_each_prompt():
    found = {one.prompt_id: one for one in by_prompt(ROWS)}
    assert list(found) == ["up", "down", "never"]
    up = found["up"]
    assert (up.visits, up.first_step, up.first, up.last_step, up.last, up.overall) == (3, 1, 0.25, 4, 1.0, 8 / 12)
    assert (found["never"].answers, found["never"].overall) == (6, 0.0)


def test_what_a_person_should_read():
    found = {heading: [one.prompt_id for one in prompts] for heading, prompts in telling(by_prompt(ROWS), 8)}
    assert found == {"never solved": ["never"], "most gained": ["up"], "most lost": ["down"]}
    many = [row for i in range(20) for row in (visit(1, f"p{i:02d}", 0, 40), visit(2, f"p{i:02d}", i + 1, 40))]
    ((heading, chosen),) = telling(by_prompt(many), 3)
    assert (heading, [one.prompt_id for one in chosen]) == ("most gained", ["p19", "p18", "p17"])
    assert telling([], 8) == []


def test_a_column_is_a_step_and_sums_to_one():
    shares, starts = rate_map(ROWS)
    assert starts.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(shares.sum(axis=0), 1.0)
    assert shares.shape == (11, 4)
    assert shares[[2, 10], 0].tolist() == [0.5, 0.5]  # 0.25 is nearest to two tenths (halves go to even)
    assert shares[0, 1] == 1.0


def test_many_steps_are_put_together():
    rows = [visit(step, "a", step % 5) for step in range(5, 1005)]
    shares, starts = rate_map(rows)
    assert len(starts) == shares.shape[1] == MAX_COLUMNS
    assert starts[0] == 5
    np.testing.assert_allclose(shares.sum(axis=0), 1.0)


@pytest.mark.parametrize(
    "damage", [{"passed": 5}, {"passed": -1}, {"answers": True}, {"answers": 2.0}, {"prompt_id": 3}, {"passed": None}]
)
def test_records_that_are_no_visit(damage):
    assert is_visit(ROWS[0])
    assert not is_visit(ROWS[0] | damage)


def test_the_report_shows_the_table_and_says_what_it_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    lines = [json.dumps(row) for row in [*ROWS, visit(5, "bad", 9)]]
    (tmp_path / "pass_rates.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(tmp_path)
    assert run.pass_rates == ROWS
    assert run.problems == [f"{tmp_path}/pass_rates.jsonl: 1 records are no prompt with answers and passed; left out"]
    page = render_report(run)
    assert "most gained" in page
    assert "of 3 prompts" in page
    assert "Pass rates" in page


def test_a_run_without_the_table_has_none_in_its_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    run = read_run(tmp_path)
    assert run.pass_rates == []
    assert "Prompts by their pass rates" not in render_report(run)
