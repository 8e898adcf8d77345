"""Runs that share `weight_sync.folder`: what one publishes is never another's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from weight_servers import WeightServerStandIn

from moerl.build_weights import weight_sender
from moerl.configure import load
from moerl.run_folder import prepare
from moerl.weight_sync.buckets import make_buckets

BASE = Path(__file__).resolve().parents[3] / "configs" / "demo" / "base.yaml"


def run_into(folder, model, runs, name="twin"):
    engine = 'rollout.engine={name: sglang, urls: ["http://127.0.0.1:30000"]}'
    settings = [engine, "weight_sync.transport=disk", f"weight_sync.folder={folder}"]
    settings += [f"model.path={model}", "model.init=random"]
    cfg = load(BASE, [f"run.name={name}", f"run.output_dir={runs}", *settings])
    prepare(cfg, resumes=False)
    return weight_sender(cfg)


async def publish(sender, server, value):
    weights = {"w": torch.full((4,), value)}
    for bucket in make_buckets(weights.items(), version=1, bucket_bytes=64, is_summed=False):
        await sender.send(bucket, [server])
    assert await sender.commit(1, [server]) == {}
    return weights


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_two_runs_of_one_name_keep_their_versions_apart(tmp_path, model):
    shared = tmp_path / "shared"

    async def main():
        first, second = (run_into(shared, model, tmp_path / runs) for runs in ("here", "there"))
        one, two, late = WeightServerStandIn(), WeightServerStandIn(), WeightServerStandIn()
        ones, twos = await publish(first, one, 1.0), await publish(second, two, 2.0)
        assert one.holds(ones)
        assert two.holds(twos)
        assert await first.replay(late, 1)
        assert late.holds(ones), "what is sent again is the run's own"
        assert all(path.name.startswith("twin-") for path in shared.iterdir())
        second.close()
        assert await first.replay(late, 1), "the end of one run takes nothing from the other"
        first.close()
        assert list(shared.iterdir()) == []

    asyncio.run(main())


def test_runs_in_folders_of_one_path_on_two_machines_keep_their_versions_apart(tmp_path, model):
    """Each has a disk of its own for its run, and both see the shared folder."""
    shared, runs = tmp_path / "shared", tmp_path / "runs"

    async def main():
        first, one, late = run_into(shared, model, runs), WeightServerStandIn(), WeightServerStandIn()
        ones = await publish(first, one, 1.0)
        runs.rename(tmp_path / "the other machine's")
        second, two = run_into(shared, model, runs), WeightServerStandIn()
        await publish(second, two, 2.0)
        assert len(list(shared.iterdir())) == 2
        assert await first.replay(late, 1)
        assert late.holds(ones)

    asyncio.run(main())


def test_a_run_that_is_started_again_after_a_kill_clears_away_what_it_had_published(tmp_path, model):
    shared, runs = tmp_path / "shared", tmp_path / "runs"
    (shared / "twin-of-another").mkdir(parents=True)

    async def main():
        killed, server = run_into(shared, model, runs), WeightServerStandIn()
        await publish(killed, server, 1.0)
        (left,) = shared.glob("twin-????????")
        again, late = run_into(shared, model, runs), WeightServerStandIn()
        assert not left.exists(), "before anything new is written"
        assert not await again.replay(late, 1), "what it had published is not served"
        twos = await publish(again, server, 2.0)
        assert sorted(path.name for path in shared.iterdir()) == sorted([left.name, "twin-of-another"])
        assert await again.replay(late, 1)
        assert late.holds(twos)
        again.close()
        assert [path.name for path in shared.iterdir()] == ["twin-of-another"]

    asyncio.run(main())
