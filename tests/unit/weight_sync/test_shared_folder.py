"""Runs that share `weight_sync.folder`: what one publishes is never another's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from weight_servers import WeightServerStandIn

from moerl.build_weights import weight_sender
from moerl.configure import load
from moerl.weight_sync.buckets import make_buckets

BASE = Path(__file__).resolve().parents[3] / "configs" / "demo" / "base.yaml"


def run_into(folder, model, name):
    engine = 'rollout.engine={name: sglang, urls: ["http://127.0.0.1:30000"]}'
    settings = [engine, "weight_sync.transport=disk", f"weight_sync.folder={folder}"]
    settings += [f"model.path={model}", "model.init=random"]
    return weight_sender(load(BASE, [f"run.name={name}", *settings]))


async def publish(sender, server, value):
    weights = {"w": torch.full((4,), value)}
    for bucket in make_buckets(weights.items(), version=1, bucket_bytes=64, is_summed=False):
        await sender.send(bucket, [server])
    assert await sender.commit(1, [server]) == {}
    return weights


def test_two_runs_of_one_name_keep_their_versions_apart(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    shared = tmp_path / "shared"

    async def main():
        first, second = (run_into(shared, model, "twin") for _ in range(2))
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
