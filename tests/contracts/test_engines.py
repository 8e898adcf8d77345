"""What every registered rollout engine keeps: order, exact arrays, versions, pause, cancel, close."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moerl.checksums import checksum
from moerl.errors import RolloutError
from moerl.reference.config import ReferenceConfig
from moerl.reference.model import ReferenceModel
from moerl.reference.sampling import Sampler
from moerl.rollout.engine import RouteLayout, ServedModel, engines, request_id
from moerl.rollout.fake_engine.serving import FakeServer
from moerl.rollout.fake_engine.settings import FakeEngineConfig
from moerl.types import SamplingParams, WeightBucket
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender

SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 17,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
}
MODEL = ReferenceModel.random(ReferenceConfig.from_dict(SHAPE), seed=0, std=0.3)
PROMPTS = [np.array([1 + i] * (1 + i % 4), dtype=np.int32) for i in range(12)]


def _local(engine_class, cfg):
    sampler = Sampler(MODEL.cfg)
    sampler.load_weights(MODEL.hf_state().items())
    return engine_class(cfg, sampler=sampler, policy_version=2)


def _dataset(engine_class, cfg):
    completions = {f"d/{i}": np.arange(1, 3 + i % 6, dtype=np.int32) for i in range(12)}
    return engine_class(cfg, completions=completions, policy_version=2)


def _sglang(engine_class, cfg):
    """Over a fake server; it stops with the engine."""
    server = FakeServer(
        FakeEngineConfig(vocab_size=17, num_layers=2, num_experts=4, lengths="uniform:4,14", is_constant=True)
    )
    server.start()
    folder = tempfile.TemporaryDirectory()
    layout = RouteLayout(num_layers=2, moe_layers=(0, 1), experts_per_token=2, num_experts=4)
    model = ServedModel(Path(folder.name), Path(folder.name), 17, layout, wants_routes=True)
    (model.path / "config.json").write_text("{}")
    sender = DiskSender(DiskConfig(), SenderPlace(model.path / "weights", model.path))
    engine = engine_class(replace(cfg, urls=[server.url]), served_model=model, policy_version=2, sender=sender)
    close = engine.close

    def close_all():
        close()
        server.stop()
        folder.cleanup()

    engine.close = close_all
    return engine


BUILDERS: dict[str, Callable] = {"local": _local, "dataset": _dataset, "sglang": _sglang}
"""One entry per engine that starts here without a server; it begins at policy version 2."""


@pytest.fixture(params=engines.names())
def engine(request):
    assert request.param in BUILDERS, f"add a builder for engine {request.param} to this file"
    plugin = engines.get(request.param)
    built = BUILDERS[request.param](plugin.target, plugin.config_class())
    yield built
    built.close()


def ask(engine, index: int, budget: int = 9):
    params = SamplingParams(budget, seed=index, stop_token_ids=(3,))
    return engine.generate(PROMPTS[index], params, request_id(f"d/{index}", 0))


async def ask_all(engine):
    return await asyncio.gather(*(ask(engine, i) for i in range(len(PROMPTS))))


def update(version: int, *, scale: float = 1.0, parts: int = 3) -> list[WeightBucket]:
    named = [(name, p.detach() * scale) for name, p in MODEL.hf_state().items()]
    cuts = [named[i::parts] for i in range(parts)]
    return [WeightBucket(version, cut, i == parts - 1, checksum(cut)) for i, cut in enumerate(cuts)]


def test_answers_find_their_request_however_many_run_at_once(engine):
    together = asyncio.run(ask_all(engine))

    async def one_by_one():
        return [await ask(engine, i) for i in range(len(PROMPTS))]

    for a, b in zip(together, asyncio.run(one_by_one()), strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_arrays_have_exactly_the_lengths_of_the_protocol(engine):
    for prompt, got in zip(PROMPTS, asyncio.run(ask_all(engine)), strict=True):
        count = len(got.token_ids)
        assert 1 <= count <= 9
        assert got.token_ids.dtype == np.int32
        assert got.logprobs.shape == (count,)
        assert got.logprobs.dtype == np.float32
        sampled = np.isfinite(got.logprobs)
        assert sampled.all() or np.isnan(got.logprobs).all(), "all of a completion has logprobs, or none"
        assert (got.logprobs[sampled] <= 0).all()
        assert got.finish_reason in ("stop", "length")
        if got.routed_experts is not None:
            assert got.routed_experts.shape == (len(prompt) + count - 1, 2, 2)
            assert got.routed_experts.open().max() < 4
        if got.support is not None:
            assert len(got.support.offsets) == count + 1


def test_the_budget_is_never_passed(engine):
    for budget in (1, 2, 5):
        got = asyncio.run(ask(engine, 5, budget))
        assert len(got.token_ids) <= budget
        if len(got.token_ids) < budget:
            assert got.finish_reason == "stop"


def test_the_version_rises_with_the_last_bucket_and_only_then(engine):
    async def main():
        seen = [(await ask(engine, 0)).policy_version]
        for bucket in update(3):
            await engine.update_weights(bucket)
            seen.append((await ask(engine, 0)).policy_version)
        return seen

    assert asyncio.run(main()) == [2, 2, 2, 3]


def test_the_same_weights_sent_again_give_the_same_answers(engine):
    async def main():
        before = await ask_all(engine)
        await engine.pause()
        for bucket in update(3):
            await engine.update_weights(bucket)
        await engine.resume()
        return before, await ask_all(engine)

    before, after = asyncio.run(main())
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_an_update_that_was_given_up_is_dropped_by_resume_and_can_be_sent_again(engine):
    async def main():
        before = await ask(engine, 1)
        for bucket in update(3, scale=3.0)[:2]:
            await engine.update_weights(bucket)
        await engine.resume()
        given_up = await ask(engine, 1)
        for bucket in update(3):
            await engine.update_weights(bucket)
        return before, given_up, await ask(engine, 1)

    before, given_up, after = asyncio.run(main())
    assert [c.policy_version for c in (before, given_up, after)] == [2, 2, 3]
    np.testing.assert_array_equal(before.logprobs, after.logprobs)


def test_requests_survive_pause_and_resume_and_cancelled_neighbours(engine):
    async def main():
        expected = await ask_all(engine)
        await engine.pause()
        tasks = [asyncio.create_task(ask(engine, i)) for i in range(len(PROMPTS))]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await engine.resume()
        return expected, await asyncio.gather(*tasks, return_exceptions=True)

    expected, got = asyncio.run(main())
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if i != 3:
            np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_memory_can_be_given_back_and_taken_again(engine):
    async def main():
        before = await ask(engine, 1)
        await engine.set_memory(released=True)
        await engine.set_memory(released=False)
        for bucket in update(3):
            await engine.update_weights(bucket)
        return before, await ask(engine, 1)

    before, after = asyncio.run(main())
    np.testing.assert_array_equal(before.token_ids, after.token_ids)


def test_a_closed_engine_refuses_and_closing_twice_is_fine(engine):
    engine.close()
    engine.close()
    with pytest.raises(RolloutError, match="request d/0#0: the engine is closed"):
        asyncio.run(ask(engine, 0))


def test_local_answers_change_with_the_weights():
    """The contract's updates above send equal weights; this one shows that they are really used."""
    engine = _local(engines.get("local").target, engines.get("local").config_class())

    async def main():
        before = await ask_all(engine)
        for bucket in update(3, scale=0.5):
            await engine.update_weights(bucket)
        return before, await ask_all(engine)

    before, after = asyncio.run(main())
    engine.close()
    assert any(not np.array_equal(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True))
    scaled = ReferenceModel(MODEL.cfg)
    scaled.load_weights((n, p.detach() * 0.5) for n, p in MODEL.hf_state().items())
    ids = torch.tensor(np.concatenate([PROMPTS[7], after[7].token_ids])).long()
    logits = scaled.forward_packed(ids, torch.tensor([0, len(ids)])).logits.log_softmax(-1)
    expected = logits[len(PROMPTS[7]) - 1 : -1].gather(-1, ids[len(PROMPTS[7]) :, None])[:, 0]
    np.testing.assert_allclose(after[7].logprobs, expected.detach().numpy(), atol=1e-5)
