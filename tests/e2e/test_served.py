"""Training with rollouts from servers: what is counted of them, and what becomes of a run when they fail."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served_runs import SERVED, assert_sampled_by, served

from moerl.rollout.fake_engine.serving import FakeServer

SAMPLES = 16


def counts(rows: list[dict[str, Any]], name: str) -> list[float]:
    """`engine/<name>` of every step, step 0 included."""
    return [row[f"engine/{name}"] for row in rows]


def wait_for_weights(server: FakeServer, label: str) -> None:
    """Until the engine has found it again, which it looks for every so often, at most every 15 s."""
    end = time.monotonic() + 60
    while server.state()["label"] != label and time.monotonic() < end:
        time.sleep(0.05)


def test_a_step_says_what_its_requests_and_servers_went_through(tmp_path: Path) -> None:
    with FakeServer(SERVED) as server:

        def trouble(step: int, groups: Any) -> None:
            if step == 2 and groups is None:
                server.set_faults({"kind": "status", "status": 503, "times": 2}, {"kind": "drop", "after": 4})

        rows = served(tmp_path / "run", [server.url], watcher=trouble)
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


def test_a_server_that_dies_in_a_step_costs_nothing_but_time_and_comes_back(tmp_path: Path) -> None:
    """Both serve; the second dies with requests on it, is away for two steps, and comes back without weights."""
    slow = replace(SERVED, token_seconds=0.01)
    with FakeServer(slow) as first, FakeServer(slow) as second:

        def trouble(step: int, groups: Any) -> None:
            if groups is not None:
                assert_sampled_by(groups, step, step - 1)
            elif step == 2:
                second.set_faults({"kind": "restart", "after": 3, "seconds": 1e9})
            elif step == 4:
                second.restart()
                wait_for_weights(second, "3")

        urls = [first.url, second.url]
        more = ("run.num_steps=5", "algorithm.routing=R3")
        rows = served(tmp_path / "run", urls, *more, watcher=trouble, affinity_slack=0)
        assert second.state()["counts"]["/generate"] > 4 + SAMPLES // 2, "it serves again"
        assert first.state()["label"] == second.state()["label"] == "5"
    assert counts(rows, "fit_servers") == [2, 2, 1, 1, 2, 2]
    assert counts(rows, "ejections") == [0, 0, 1, 0, 0, 0]
    assert counts(rows, "completions") == [0, *[SAMPLES] * 5]
    assert counts(rows, "resent")[2] == counts(rows, "lost")[2] > 0
    assert [row["rollout/errors"] for row in rows[1:]] == [0] * 5
    assert [row["rollout/staleness_mean"] for row in rows[1:]] == [0] * 5


def test_the_only_server_may_die_while_the_learner_trains(tmp_path: Path) -> None:
    """No health check has found it when the weights are to be sent; before, that ended the run."""
    with FakeServer(SERVED) as server:

        def trouble(step: int, groups: Any) -> None:
            if groups is not None:
                assert_sampled_by(groups, step, step - 1)
                if step == 2:
                    server.restart(1.0)

        more = ("run.num_steps=4", "algorithm.routing=R3")
        rows = served(tmp_path / "run", [server.url], *more, watcher=trouble, health_seconds=1000.0)
        assert (server.state()["num_restarts"], server.state()["label"]) == (1, "4")
    assert counts(rows, "ejections") == [0, 0, 1, 0, 0]
    assert counts(rows, "returns") == [0, 0, 0, 1, 0]
    assert [row["rollout/errors"] for row in rows[1:]] == [0] * 4


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_a_server_that_dies_in_a_weight_update_serves_no_mixture(tmp_path: Path, transport: str) -> None:
    endpoint = f"/update_weights_from_{transport}"
    with FakeServer(SERVED) as first, FakeServer(SERVED) as second:

        def trouble(step: int, groups: Any) -> None:
            if groups is not None:
                assert_sampled_by(groups, step, step - 1)
            elif step == 2:  # in the middle of the update after this step
                after = 0 if transport == "disk" else 2
                second.set_faults({"kind": "restart", "endpoint": endpoint, "after": after, "seconds": 0.3})
            elif step == 4:
                wait_for_weights(second, "3")

        more = (
            f"weight_sync.transport={{name: {transport}, check_every: 0}}",  # a fake server reads no weights
            "weight_sync.bucket_bytes=400000",
            "run.num_steps=4",
            "algorithm.routing=R3",
        )
        rows = served(tmp_path / "run", [first.url, second.url], *more, watcher=trouble, affinity_slack=0)
        assert second.state()["num_restarts"] == 1
        assert first.state()["label"] == second.state()["label"] == "4"
        digests = [server.call(lambda app: app.state.digest.hexdigest()) for server in (first, second)]
    if transport == "disk":  # the fake's digest of buckets goes back to its start
        assert digests[0] == digests[1]
    assert sum(counts(rows, "ejections")) == 1
    assert sum(counts(rows, "returns")) == 1
    assert counts(rows, "completions") == [0, *[SAMPLES] * 4]
