"""`moerl eval` finds the numbers that the run itself wrote down."""

from __future__ import annotations

import json

import pytest


def evaluations(stage):
    run = stage.runs["tiny"]
    tiny, folder = str(stage.files.tiny), str(run.folder)
    return {
        "configuration": stage.moerl.call("eval", tiny, "--json"),
        "run": stage.moerl.call("eval", folder, "--json"),
        "step": stage.moerl.call("eval", folder, "--step", "4", "--json"),
        "exported": stage.moerl.call("eval", tiny, "--model", f"{folder}/hf", "--json", "evaluation.pass_at=[1]"),
    }


def refusals(stage):
    run = stage.runs["tiny"]
    folder = str(run.folder)
    return {
        "table": stage.moerl.call("eval", folder, "evaluation.sets.0.limit=4"),
        "no such step": stage.moerl.call("eval", folder, "--step", "77"),
        "no such model": stage.moerl.call("eval", str(stage.files.tiny), "--model", "nowhere"),
        "supervised, no weights": stage.moerl.call("eval", "configs/demo/sft.yaml"),
    }


@pytest.mark.runs.with_args("tiny", evaluations)
@pytest.mark.parametrize(("name", "step"), [("configuration", 0), ("run", 6), ("step", 4), ("exported", 6)])
def test_eval_agrees_with_the_run(runs, name, step):
    found = json.loads(runs[evaluations][name].expect(0).stdout)
    row = runs["tiny"].rows[step]
    assert row["step"] == step
    expected = {key: value for key, value in row.items() if key.startswith("eval/")}
    assert len(expected) >= 8
    assert found == expected


@pytest.mark.runs.with_args("tiny", refusals)
def test_eval_prints_a_table_and_says_what_is_wrong(runs):
    outcomes = runs[refusals]
    assert "eval/accuracy_greedy" in outcomes["table"].expect(0).stdout
    missing = outcomes["no such step"].expect(1)
    assert "step_000077 is no complete checkpoint; there are steps [4, 5, 6]" in missing.stderr
    model = outcomes["no such model"].expect(2)
    assert "nowhere" in model.stderr
    fresh = outcomes["supervised, no weights"]
    assert fresh.status in (1, 2)
    assert "configs/demo/policy_init" in fresh.stderr
    for outcome in outcomes.values():
        assert "Traceback" not in outcome.output
