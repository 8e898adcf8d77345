"""Level 2: every weight transport into a real SGLang server, TP1 and TP2 x EP2, in float32."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sglang_talk import Oracle, Talk

from moerl.errors import WeightSyncError
from moerl.models.hf_export import write_hf_folder
from moerl.rollout.sglang.arguments import SglangServerConfig
from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.servers import SglangServers
from moerl.weight_sync.buckets import make_buckets
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender
from moerl.weight_sync.transports.distributed import DistributedConfig, DistributedSender
from moerl.weight_sync.transports.tensor import TensorConfig, TensorSender

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "configs" / "demo" / "policy"
PROMPT = [11, 14, 10, 15, 9, 14, 13, 18, 21]
TOLERANCE = 2e-5
BUCKET_BYTES = 100_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2xep2"])
def server(request, python, tmp_path_factory):
    config = SglangServerConfig(
        python=str(python),
        tensor=request.param,
        expert=request.param,
        dtype="float32",
        max_total_tokens=4096,
        max_running_requests=8,
    )
    servers = SglangServers(config, model_path=POLICY, log_folder=tmp_path_factory.mktemp("logs"), returns_routes=True)
    try:
        servers.start()
        yield servers.servers[0]
    finally:
        servers.stop()


def policy(seed):
    """The demo's policy with noise in every matrix; experts apart, as they are exported."""
    torch.manual_seed(seed)
    return {
        name: tensor.float() + 0.1 * torch.randn(tensor.shape) if tensor.dim() > 1 else tensor.float()
        for name, tensor in load_file(POLICY / "model.safetensors").items()
    }


def oracle_of(weights, folder):
    shutil.rmtree(folder, ignore_errors=True)
    write_hf_folder(folder, weights.items(), POLICY)
    return Oracle(folder)


def make(kind, place):
    if kind == "disk":
        return DiskSender(DiskConfig(check_every=1), place)
    if kind == "tensor":
        return TensorSender(TensorConfig(check_every=2), place)
    return DistributedSender(DistributedConfig(check_every=2, timeout_seconds=90.0), place)


async def publish(client, sender, weights, version, bucket_bytes=BUCKET_BYTES):
    """The transaction of `Updates`, with one server; returns the number of buckets."""
    count = 0
    await client.pause("abort")
    for bucket in make_buckets(weights.items(), version=version, bucket_bytes=bucket_bytes, is_summed=False):
        assert await sender.send(bucket, [client]) == {}
        count += 1
    assert await sender.commit(version, [client]) == {}
    assert (await client.model_info()).weight_version == str(version)
    await client.flush_cache()
    await client.continue_generation()
    return count


@contextlib.asynccontextmanager
async def connected(server):
    client = SglangClient(server.url, admin_key=server.admin_key)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize("kind", ["disk", "tensor", "distributed"])
def test_weights_equal_a_load_from_disk_and_are_served(server, kind, tmp_path):
    """Updates 1 and 3 are checked by the sender; 2 is not, and is compared here."""

    async def run():
        async with connected(server) as client:
            sender = make(kind, SenderPlace(tmp_path / "weights", POLICY))
            try:
                for version in (1, 2, 3):
                    weights = policy(100 * version)
                    assert await publish(client, sender, weights, version) > 5
                    sent = await client.checksum()
                    oracle = oracle_of(weights, tmp_path / "hf")
                    answer = await asyncio.to_thread(Talk(server).generate, PROMPT, ignore_eos=True)
                    assert answer.meta["weight_version"] == str(version)
                    assert oracle.gaps(PROMPT, answer).max() < TOLERANCE
                    np.testing.assert_array_equal(answer.routes, oracle(PROMPT + answer.ids)[1][:-1])
                    await client.update_from_disk(str(tmp_path / "hf"), weight_version=version)
                    assert (await client.checksum()) == sent
            finally:
                await sender.give_up([client])
                sender.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["tensor", "distributed"])
def test_an_update_that_is_given_up_can_be_replaced(server, kind, tmp_path):
    """The label stays the old one, and the server holds a mixture until the next whole version."""

    async def run():
        async with connected(server) as client:
            sender = make(kind, SenderPlace(tmp_path / "weights", POLICY))
            try:
                await publish(client, sender, policy(1), 11)
                whole = await client.checksum()
                buckets = list(make_buckets(policy(2).items(), version=12, bucket_bytes=BUCKET_BYTES, is_summed=False))
                await client.pause("abort")
                for bucket in buckets[:3]:
                    assert await sender.send(bucket, [client]) == {}
                await sender.give_up([client])
                assert (await client.model_info()).weight_version == "11"
                assert await client.checksum() != whole, "a mixture"
                assert await sender.replay(client, 11), "the first update was checked, so it lies on the disk"
                assert await client.checksum() == whole
                await publish(client, sender, policy(2), 12)
                assert await client.checksum() != whole
            finally:
                await sender.give_up([client])
                sender.close()

    asyncio.run(run())


def test_a_bucket_outside_a_session_is_refused_and_the_trainer_goes_on(server, tmp_path, monkeypatch):
    """The server answers without joining the broadcast, which then has to end by itself."""
    monkeypatch.setattr("moerl.weight_sync.transports.distributed._GRACE_SECONDS", 3.0)

    async def run():
        async with connected(server) as client:
            sender = DistributedSender(
                DistributedConfig(check_every=0, timeout_seconds=20.0), SenderPlace(tmp_path / "weights", POLICY)
            )
            try:
                (first, *rest) = make_buckets(policy(3).items(), version=21, bucket_bytes=BUCKET_BYTES, is_summed=False)
                assert await sender.send(first, [client]) == {}
                await client.end_update()
                failures = await sender.send(rest[0], [client])
                assert "must run between begin_weight_update" in str(failures[client])
                assert isinstance(failures[client], WeightSyncError)
                await sender.give_up([client])
                await publish(client, sender, policy(3), 22)
            finally:
                await sender.give_up([client])
                sender.close()

    asyncio.run(run())
