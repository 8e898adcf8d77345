"""Training with rollouts from servers: what is counted of them, and what becomes of a run when they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from served_runs import SERVED, served

from moerl.rollout.fake_engine.serving import FakeServer

SAMPLES = 16


def counts(rows: list[dict[str, Any]], name: str) -> list[float]:
    """`engine/<name>` of every step, step 0 included."""
    return [row[f"engine/{name}"] for row in rows]


def test_a_step_says_what_its_requests_and_servers_went_through(tmp_path: Path) -> None:
    with FakeServer(SERVED) as server:

        def trouble(step: int) -> None:
            if step == 2:
                server.set_faults({"kind": "status", "status": 503, "times": 2}, {"kind": "drop", "after": 4})

        rows = served(tmp_path / "run", [server.url], on_step=trouble)
        asked = server.state()["counts"]["/generate"]
    assert counts(rows, "completions") == [0, SAMPLES, SAMPLES, SAMPLES]
    assert counts(rows, "retries") == [0, 0, 3, 0], "differences, not totals"
    assert counts(rows, "busy") == [0, 0, 2, 0]
    assert counts(rows, "lost") == [0, 0, 1, 0]
    assert counts(rows, "ejections") == counts(rows, "returns") == [0, 0, 1, 0]
    assert counts(rows, "requests") == [0, SAMPLES, SAMPLES + 3, SAMPLES]
    assert counts(rows, "timeouts") == counts(rows, "bad_answers") == counts(rows, "restarts") == [0] * 4
    assert counts(rows, "fit_servers") == [1] * 4
    assert sum(counts(rows, "requests")) == asked
    assert counts(rows, "generated_tokens")[1:] == [row["rollout/tokens"] for row in rows[1:]]
