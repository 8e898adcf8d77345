"""Answers that a real SGLang 0.5.23 gave, read by the decoder and compared with the fake server's, key by key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from moerl.rollout.engine import RouteLayout
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.rollout.sglang.wire import Expected, WireRequest, read_answer
from moerl.types import SamplingParams

FOLDER = Path(__file__).resolve().parents[3] / "data/sglang"
RECORDS = {f"{path.parent.name}/{path.stem}": json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/*.json"))}
DEMO = json.loads((Path(__file__).resolve().parents[4] / "configs/demo/policy/config.json").read_text())
LAYOUT = RouteLayout(
    DEMO["num_hidden_layers"],
    tuple(range(DEMO["num_hidden_layers"])),
    DEMO["num_experts_per_tok"],
    DEMO["num_experts"],
)
EXPECTED = Expected(LAYOUT, DEMO["vocab_size"])


def is_one_answer(record: dict) -> bool:
    """Of one request of token ids, with what training needs of it."""
    body = record["request"]["body"] or {}
    plain = record["request"]["path"] == "/generate" and record["status"] == 200
    return plain and isinstance(record["answer"], dict) and body.get("return_logprob") is True


SINGLE = sorted(name for name, record in RECORDS.items() if is_one_answer(record))
_TIMES = """storage_prefetch_wait storage_staging_wait forward_entry_time prefill_finished_time queue_time e2e_latency
request_received_ts first_token_latency api_server_dispatch_finish_ts request_finished_ts decode_throughput
response_sent_to_client_ts output_token_sampling_mask_length"""
TIMES = frozenset(_TIMES.split())
"""What a real answer says beside, and nothing here reads."""
FAKE = {
    "/generate",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/begin_weight_update",
    "/end_weight_update",
    "/weights_checker",
    "/abort_request",
    "/update_weights_from_tensor",
}
OTHER_ON_PURPOSE = {
    "batch",
    "several",
    "input_logprobs",
    "too_long",
    "same_rid_0",
    "same_rid_1",
    "abort",
    "without_key",
}
"""What the fake server does not serve, or what depends on what was asked at the same time."""


def request_of(record: dict) -> WireRequest:
    body = record["request"]["body"]
    sampling = body["sampling_params"]
    params = SamplingParams(
        sampling["max_new_tokens"],
        temperature=sampling.get("temperature", 1.0),
        top_p=sampling.get("top_p", 1.0),
        top_k=max(sampling.get("top_k", 0), 0),
        stop_token_ids=tuple(sampling.get("stop_token_ids", ())),
        top_logprobs=body.get("top_logprobs_num", 0),
    )
    start = body.get("routed_experts_start_len", 0) if body.get("return_routed_experts") else None
    return WireRequest(body["rid"], np.array(body["input_ids"], dtype=np.int32), params, start)


def test_there_are_records_of_one_and_of_two_ranks():
    assert len(SINGLE) >= 8
    assert {name.split("/")[0] for name in SINGLE} >= {"tp1"}


@pytest.mark.parametrize("name", SINGLE)
def test_a_real_answer_is_read(name):
    record = RECORDS[name]
    request, raw = request_of(record), record["answer"]
    got = read_answer(raw, request, EXPECTED)
    assert got.token_ids.tolist() == raw["output_ids"]
    assert len(got.logprobs) == len(got.token_ids)
    assert got.finish_reason == raw["meta_info"]["finish_reason"]["type"]
    if len(got.token_ids):
        assert got.spans == ((0, len(got.token_ids), int(raw["meta_info"]["weight_version"])),)
    if request.routes_from is not None and len(got.token_ids):
        assert got.routes is not None
        rows = len(request.token_ids) + len(got.token_ids) - 1 - request.routes_from
        assert got.routes.shape == (rows, LAYOUT.num_layers, LAYOUT.experts_per_token)
    if request.is_truncated:
        assert got.support is not None
        assert len(got.support.offsets) == len(got.token_ids) + 1


@pytest.mark.parametrize("ranks", ["tp1", "tp2"])
def test_a_cached_prefix_has_the_same_routes_as_a_cold_one(ranks):
    """Pitfall 5, as the real server keeps it: all rows of a prompt are the same wherever they were recorded."""
    rows: dict[bool, list[np.ndarray]] = {True: [], False: []}
    prompts = set()
    for name in SINGLE:
        request, raw = request_of(RECORDS[name]), RECORDS[name]["answer"]
        if name.startswith(f"{ranks}/") and request.routes_from == 0:
            got = read_answer(raw, request, EXPECTED)
            prompts.add(tuple(request.token_ids))
            assert got.routes is not None
            rows[got.cached_tokens > 0].append(got.routes[: len(request.token_ids)])
    assert len(prompts) == 1
    assert rows[True], "nothing was in the cache"
    assert rows[False], "nothing was computed anew"
    for row in rows[True]:
        np.testing.assert_array_equal(row, rows[False][0])


@pytest.fixture(scope="module")
def fake():
    cfg = FakeEngineConfig(
        vocab_size=DEMO["vocab_size"],
        num_layers=LAYOUT.num_layers,
        num_experts=LAYOUT.num_experts,
        experts_per_token=LAYOUT.experts_per_token,
        weight_version="0",
    )
    with FakeServer(cfg) as server:
        yield server


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, record in RECORDS.items()
        if record["request"]["path"] in FAKE and name.split("/")[1] not in OTHER_ON_PURPOSE
    ],
)
def test_the_fake_server_answers_with_the_same_status_and_keys(fake, name):
    record = RECORDS[name]
    fake.call(lambda app: app.state.resume())

    async def ask():
        call = record["request"]
        async with (
            aiohttp.ClientSession() as session,
            session.request(call["method"], fake.url + call["path"], json=call["body"]) as response,
        ):
            return response.status, await response.read()

    status, raw = asyncio.run(ask())
    fake.call(lambda app: setattr(app.state, "in_update", False))
    if name.endswith("/end"):
        return
    assert status == record["status"], raw[:300]
    if not isinstance(record["answer"], dict):
        return
    answer = json.loads(raw)
    assert set(answer) == set(record["answer"])
    if "meta_info" in answer:
        real, ours = record["answer"]["meta_info"], answer["meta_info"]
        assert set(real) - TIMES == set(ours) - TIMES
        same_kind = {
            "output_token_logprobs",
            "weight_versions",
            "routed_experts",
            "finish_reason",
            "id",
            "weight_version",
        }
        for key in same_kind & set(real):
            assert type(real[key]) is type(ours[key]), key
