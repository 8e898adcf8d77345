"""Level 2: a real SGLang server dies (SIGKILL) between two buckets of an update, through the whole engine."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_talk import Oracle, kill

from moerl.models.hf_export import write_hf_folder
from moerl.rollout.engine import ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.rollout.sglang.client import SglangClient
from moerl.types import SamplingParams
from moerl.weight_sync.buckets import make_buckets
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender
from moerl.weight_sync.transports.distributed import DistributedConfig, DistributedSender
from moerl.weight_sync.transports.tensor import TensorConfig, TensorSender

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "configs" / "demo" / "policy"
PROMPT = [11, 14, 10, 15, 9, 14, 13, 18, 21]
TOLERANCE = 5e-5
RESTART_SECONDS = 240.0

pytestmark = pytest.mark.slow


def policy(seed):
    """The demo's policy with noise in every matrix; experts apart, as they are exported."""
    torch.manual_seed(seed)
    return {
        name: tensor.float() + 0.1 * torch.randn(tensor.shape) if tensor.dim() > 1 else tensor.float()
        for name, tensor in load_file(POLICY / "model.safetensors").items()
    }


def sender_of(kind, place):
    if kind == "disk":
        return DiskSender(DiskConfig(check_every=0), place)
    if kind == "tensor":
        return TensorSender(TensorConfig(check_every=0, keep_copy=True), place)
    return DistributedSender(DistributedConfig(check_every=0, keep_copy=True, timeout_seconds=60.0), place)


@pytest.fixture(
    params=[("disk", 2, 1), ("tensor", 2, 1), ("distributed", 2, 1), ("tensor", 1, 1), ("tensor", 1, 2)],
    ids=["disk", "tensor", "distributed", "tensor_the_only_one", "tensor_the_only_one_tp2xep2"],
)
def engine(request, python, tmp_path):
    kind, num_servers, ranks = request.param
    servers = {
        "num_servers": num_servers,
        "tensor": ranks,
        "expert": ranks,
        "python": str(python),
        "dtype": "float32",
        "max_total_tokens": 4096,
        "max_running_requests": 8,
    }
    cfg = SglangEngineConfig(servers=servers, precision="fp32", health_seconds=1.0, affinity_slack=0)
    (tmp_path / "run").mkdir()
    vocab_size = json.loads((POLICY / "config.json").read_text())["vocab_size"]
    model = ServedModel(POLICY, tmp_path / "run", vocab_size, None, wants_routes=False)
    sender = sender_of(kind, SenderPlace(tmp_path / "run" / "engine_weights", POLICY))
    engine = SglangEngine(cfg, served_model=model, sender=sender)
    try:
        yield engine
    finally:
        engine.close()


async def gaps(engine, oracle, count):
    """Largest |server - plain model| of the logprobs of `count` answers, and their versions."""
    asked = (engine.generate(PROMPT, SamplingParams(12, seed=i), f"p{i}/{i}#0") for i in range(count))
    largest, versions = 0.0, set()
    for got in await asyncio.gather(*asked):
        ids = [int(token) for token in got.token_ids]
        own = oracle(PROMPT + ids)[0]
        ours = own[range(len(PROMPT) - 1, len(PROMPT) - 1 + len(ids)), ids]
        largest = max(largest, float(abs(ours - got.logprobs).max()))
        versions.add(got.policy_version)
    return largest, versions


async def labels_and_sums(engine):
    found = []
    for server in engine._found:
        client = SglangClient(server.url, admin_key=server.admin_key)
        try:
            found.append(((await client.model_info()).weight_version, await client.checksum()))
        finally:
            await client.close()
    return found


def test_a_server_killed_between_two_buckets_costs_no_answer_and_comes_back_with_the_weights_of_now(engine, tmp_path):
    async def run():
        await engine.generate(PROMPT, SamplingParams(4, seed=0), "first/0#0")
        weights = policy(7)
        write_hf_folder(tmp_path / "hf", weights.items(), POLICY)
        oracle = Oracle(tmp_path / "hf")
        buckets = list(make_buckets(weights.items(), version=1, bucket_bytes=100_000, is_summed=True))
        assert len(buckets) > 4
        await engine.pause()
        for place, bucket in enumerate(buckets):
            if place == 2:
                kill(engine._found[-1])
            await engine.update_weights(bucket)
        await engine.resume()
        assert engine.policy_version == 1
        gap, versions = await gaps(engine, oracle, 6)
        assert gap < TOLERANCE
        assert versions == {1}
        end = time.monotonic() + RESTART_SECONDS
        while engine.counts()["returns"] < 1:
            assert time.monotonic() < end, engine.counts()
            await asyncio.sleep(0.5)
        found = await labels_and_sums(engine)
        assert {label for label, _ in found} == {"1"}
        assert all(checksum == found[0][1] for _, checksum in found)
        gap, versions = await gaps(engine, oracle, 12)
        assert gap < TOLERANCE
        assert versions == {1}
        assert engine.counts()["restarts"] == 1

    asyncio.run(run())
