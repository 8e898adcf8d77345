"""Level 2: what the engine makes of a real SGLang server's answers: cut-off distributions, the rows of two turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from sglang_talk import Oracle

from moerl.rollout.engine import RouteLayout, ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.types import SamplingParams
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender

POLICY = Path(__file__).resolve().parents[2] / "configs" / "demo" / "policy"
PROMPT = np.array([11, 14, 10, 15, 9, 14, 13, 18, 21], dtype=np.int32)
LAYOUT = RouteLayout(num_layers=2, moe_layers=(0, 1), experts_per_token=2, num_experts=16)
TOLERANCE = 5e-5
TEMPERATURE = 1.6
"""So high that several tokens are in the running."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    servers = {"python": str(python), "dtype": "float32", "max_total_tokens": 4096, "max_running_requests": 8}
    cfg = SglangEngineConfig(servers=servers, precision="fp32", routes="always")
    vocab_size = json.loads((POLICY / "config.json").read_text())["vocab_size"]
    model = ServedModel(POLICY, folder, vocab_size, LAYOUT, wants_routes=True)
    sender = DiskSender(DiskConfig(check_every=0), SenderPlace(folder / "engine_weights", POLICY))
    engine = SglangEngine(cfg, served_model=model, sender=sender)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def oracle():
    return Oracle(POLICY)


def answers(engine, *params):
    """To the prompt, one for each of `params`, all at once."""

    async def ask():
        return await asyncio.gather(*(engine.generate(PROMPT, one, f"p{i}/0#0") for i, one in enumerate(params)))

    return asyncio.run(ask())


def kept_by(probs, top_k, top_p):
    """Tokens that top-k and then top-p leave in the running: the likeliest whose forerunners have less than top_p."""
    order = np.argsort(-probs, kind="stable")[: top_k or None]
    before = np.cumsum(probs[order]) - probs[order]
    total = probs[order].sum() if top_k else 1.0
    return set(order[before < top_p * total].tolist())


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (0, 0.9)])
def test_logprobs_are_those_of_the_tokens_in_the_running(engine, oracle, top_k, top_p):
    asked = [SamplingParams(12, temperature=TEMPERATURE, top_k=top_k, top_p=top_p, seed=i) for i in range(6)]
    sizes = []
    for got in answers(engine, *asked):
        assert got.support is not None
        ids = got.token_ids.tolist()
        table, _ = oracle([*PROMPT.tolist(), *ids], TEMPERATURE)
        for step, token in enumerate(ids):
            row = table[len(PROMPT) - 1 + step]
            kept = got.support.ids[got.support.offsets[step] : got.support.offsets[step + 1]]
            assert token in kept
            assert set(kept.tolist()) == kept_by(np.exp(row), top_k, top_p)
            assert abs(row[token] - np.logaddexp.reduce(row[kept]) - got.logprobs[step]) < TOLERANCE
            sizes.append(len(kept))
    assert np.mean(sizes) > 1.5, "nothing was cut off that mattered"
    assert max(sizes) < len(table[0])


def test_the_rows_of_two_turns_are_those_of_one_forward(engine, oracle):
    """The last token of the first turn has its row from the second one's request, which asks from there on."""

    async def turns():
        first = await engine.generate(PROMPT, SamplingParams(8, seed=3), "p0/0#0")
        text = np.concatenate([PROMPT, first.token_ids, np.array([9, 14, 5], dtype=np.int32)])
        boundary = len(PROMPT) + len(first.token_ids) - 1
        second = await engine.generate(text, SamplingParams(8, seed=4, routes_from=boundary), "p0/0#1")
        return first, text, boundary, second

    first, text, boundary, second = asyncio.run(turns())
    ids = np.concatenate([text, second.token_ids]).tolist()
    _, expected = oracle(ids)
    rows = first.routed_experts.open()
    assert len(rows) == boundary, "its last token never went through a forward"
    later = second.routed_experts.open()
    assert second.routes_from <= boundary
    assert second.routes_from + len(later) == len(ids) - 1
    joined = np.concatenate([rows[: second.routes_from], later])
    np.testing.assert_array_equal(np.sort(joined, -1), np.sort(expected[:-1], -1))
