"""Level 1, no server: what moerl sends, through SGLang's own request classes. A key that they lack would be ignored."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from sglang_process import inside

from moerl.rollout.sglang.client import SglangClient
from moerl.rollout.sglang.wire import WireRequest, payload
from moerl.types import SamplingParams

POLICY = Path(__file__).resolve().parents[2] / "configs" / "demo" / "policy"

CLASSES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/weights_checker": "CheckWeightsReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Endpoint -> the class that SGLang makes of its body."""

SAMPLING = {
    "plain": {},
    "cold": {"temperature": 0.7},
    "greedy": {"temperature": 0.0, "top_p": 0.5, "top_k": 3},
    "top p": {"top_p": 0.9},
    "top k": {"top_k": 20, "top_p": 0.8},
    "one token": {"max_new_tokens": 1},
    "stop ids": {"stop_token_ids": (1, 2)},
    "stop strings": {"stop_strings": ("=", "}+")},
    "largest seed": {"seed": 2**63 - 1},
    "likeliest": {"top_logprobs": 5},
}


class Recorder:
    """In the place of a connection: notes what is posted and answers as SGLang would."""

    def __init__(self):
        self.posted = []

    async def post(self, endpoint, body, *, seconds, method="POST"):
        self.posted.append((endpoint, body))
        return b""

    def parsed(self, endpoint, body):
        return {"success": True, "status": "ok", "per_engine_checksum": "x", "ranks": [{"checksums": {}}]}


async def call_everything(client):
    await client.generate(payload(WireRequest("r", np.array([3, 4], np.int32), SamplingParams(max_new_tokens=2))))
    await client.abort("r-1")
    await client.abort_all()
    for mode in ("abort", "retract", "in_place"):
        await client.pause(mode)
    await client.continue_generation()
    await client.begin_update()
    await client.end_update()
    await client.update_from_disk("/folder", weight_version=3, load_format="auto", keep_pause=True)
    await client.update_from_tensor(["AAAA"], load_format="flattened_bucket", weight_version=3)
    await client.init_group(
        master_address="127.0.0.1", master_port=5, rank_offset=1, world_size=2, group_name="g", backend="gloo"
    )
    named = [("a.weight", "bfloat16", (2, 3))]
    await client.update_from_distributed(named, group_name="g", load_format="flattened_bucket", weight_version=3)
    await client.destroy_group("g")
    await client.relabel("4")
    await client.checksum()
    await client.release_memory(["kv_cache", "weights"])
    await client.resume_memory(["weights"])


@pytest.fixture(scope="module")
def posted():
    client = SglangClient("http://127.0.0.1:1")
    client._connection = Recorder()
    asyncio.run(call_everything(client))
    return client._connection.posted


@pytest.fixture(scope="module")
def bodies():
    """Payloads of `/generate` by name."""
    ids = np.array([3, 4, 5], np.int32)
    made = {
        name: payload(WireRequest(f"r-{name}", ids, SamplingParams(**({"max_new_tokens": 8} | fields)), routes_from=2))
        for name, fields in SAMPLING.items()
    }
    return made | {"on a rank": payload(WireRequest("r", ids, SamplingParams(max_new_tokens=8), data_rank=1))}


@pytest.fixture(scope="module")
def answers(python, posted, bodies):
    asked = [[CLASSES[endpoint], body] for endpoint, body in posted]
    asked += [["GenerateReqInput", body] for body in bodies.values()]
    asked += [["GenerateReqInput", bodies["plain"] | {"no_such_option": 1}], ["PauseGenerationReqInput", {"mode": "x"}]]
    return inside(python, {"payloads": asked, "tokenizer": str(POLICY)})["payloads"]


def test_every_control_call_is_what_sglang_reads(posted, answers):
    assert {endpoint for endpoint, _ in posted} == set(CLASSES)
    for (endpoint, body), answer in zip(posted, answers, strict=False):
        assert answer["unknown"] == [], endpoint
        assert "error" not in answer, (endpoint, answer)
        if endpoint != "/generate":
            bodies = body | ({"serialized_named_tensors": [bytes(3)]} if "serialized_named_tensors" in body else {})
            assert answer["fields"] == {key: str(value) for key, value in bodies.items()}, endpoint


def test_every_way_of_sampling_is_what_sglang_reads(posted, bodies, answers):
    for name, answer in zip(bodies, answers[len(posted) :], strict=False):
        assert answer["unknown"] == [], name
        assert "error" not in answer, (name, answer)
        assert answer["fields"]["input_ids"] == "[3, 4, 5]"
        assert answer["stops"] == [*SAMPLING.get(name, {}).get("stop_strings", ())], name


def test_the_classes_do_refuse(answers):
    assert answers[-2]["unknown"] == ["no_such_option"]
    assert "error" in answers[-2]
    assert "error" in answers[-1]
