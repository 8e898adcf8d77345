"""Held-out evaluation on servers: during training, and by `moerl eval` of a configuration, a folder and a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from served_runs import SERVED, SMALL, engine_of, served

from moerl.__main__ import main
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.run_folder import lock

HELD, SAMPLED, STEPS, TRAINED = 6, 2, 2, 16
EVALUATING = (
    "evaluation.sets=[{name: held, source: {name: file, path: configs/demo/data/heldout.jsonl}, limit: 6}]",
    "evaluation.interval_steps=1",
    f"run.num_steps={STEPS}",
    "algorithm.routing=R3",
    "checkpoint.interval_steps=1",
)
"""With R3, so that training asks for routes and evaluation must not."""


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    """What `moerl eval --json` prints."""
    capsys.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def overrides(folder: Path, url: str) -> list[str]:
    return [*SMALL, *EVALUATING, engine_of([url]), f"run.output_dir={folder}", "run.name=run"]


def digest(server: FakeServer) -> str:
    return server.call(lambda app: app.state.digest.hexdigest())


def test_training_evaluates_on_its_servers_and_eval_finds_the_same_numbers(tmp_path, capsys):
    with FakeServer(SERVED) as server:
        rows = served(tmp_path / "run", [server.url], *EVALUATING)
        for row in rows:
            asked = HELD * (1 + SAMPLED) + (TRAINED if row["step"] else 0)
            assert row["engine/completions"] == asked
            assert len(numbers(row)) >= 6
            assert row["eval/response_length_greedy"] > 0
        assert [row["step"] for row in rows] == [0, 1, 2]
        rows_of_routes = server.state()["counts"]["route_rows"]
        prompts_and_answers = sum(row["engine/generated_tokens"] + row["engine/prompt_tokens"] for row in rows)
        assert 0 < rows_of_routes < prompts_and_answers - STEPS * TRAINED, "evaluation asks for no routes"

        given = overrides(tmp_path, server.url)
        for arguments, row, label in (
            (["configs/demo/gspo.yaml", *given], rows[0], "0"),
            ([str(tmp_path / "run"), "--step", "1"], rows[1], "1"),
            ([str(tmp_path / "run")], rows[2], "2"),
        ):
            server.restart()
            assert evaluated(capsys, *arguments) == numbers(row), arguments
            assert server.state()["label"] == label
            assert server.state()["counts"]["route_rows"] == rows_of_routes
    assert not list(tmp_path.glob("evaluation-*"))
    assert not (tmp_path / "run" / "engine_weights").exists()


def test_the_folder_that_is_judged_is_what_the_servers_get(tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for path in Path("configs/demo/policy").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, other / "model.safetensors")
    with FakeServer(SERVED) as server:
        given = ["configs/demo/gspo.yaml", *overrides(tmp_path / "runs", server.url)]
        seen = []
        for model in (["--model", "configs/demo/policy"], ["--model", str(other)], []):
            evaluated(capsys, *given, *model)
            seen.append(digest(server))
    assert seen[0] == seen[2] != seen[1]


def test_servers_of_a_run_that_trains_are_left_alone(tmp_path, caplog, capsys):
    with FakeServer(SERVED) as server, lock(tmp_path / "run"):
        assert main(["eval", "configs/demo/gspo.yaml", *overrides(tmp_path, server.url)]) == 2
        assert "in use by another moerl process" in capsys.readouterr().err
        assert "/update_weights_from_disk" not in server.state()["calls"]
