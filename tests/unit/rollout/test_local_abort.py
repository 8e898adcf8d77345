"""The local engine that cuts answers off at an update: what came is kept, the new policy goes on from there."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from moerl.checksums import checksum
from moerl.envs.single_turn import SingleTurn, SingleTurnConfig
from moerl.errors import RolloutError
from moerl.reference.config import ReferenceConfig
from moerl.reference.model import ReferenceModel
from moerl.reference.sampling import Sampler
from moerl.rollout.engines.local_engine import LocalEngine, LocalEngineConfig
from moerl.types import Prompt, SamplingParams, WeightBucket

SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 38,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
}
PROMPT = np.array([3, 1, 4, 1, 5], dtype=np.int32)
SECONDS = 60
TOLERANCE = 2e-5


def model_of(seed: int) -> ReferenceModel:
    return ReferenceModel.random(ReferenceConfig.from_dict(SHAPE), seed=seed, std=0.2)


def sampler_of(model: ReferenceModel, kind: type[Sampler] = Sampler) -> Sampler:
    sampler = kind(model.cfg)
    sampler.load_weights(model.state_dict().items())
    return sampler


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize(("stop", "kept"), [((), 6), (("no",), 4), (("é", "n"), 4), (("much longer",), 0)])
def test_of_an_abort_the_tokens_in_which_a_stop_string_may_begin_are_left_out(stop, kept, top_p):
    """Who goes on from there starts with them, and sees the whole of the string."""
    model = model_of(0)
    sampler = Sampler(model.cfg, decode=lambda ids: "")
    sampler.load_weights(model.state_dict().items())
    params = SamplingParams(60, seed=8, stop_strings=stop, top_p=top_p, top_logprobs=2 if top_p == 1 else 0)
    asked = iter(range(1, 100))
    (part,) = sampler.generate([np.array([1, 2])], [params], lambda: next(asked) == 6)
    (whole,) = sampler.generate([np.array([1, 2])], [params])
    assert (part.finish_reason, part.token_ids.tolist()) == ("abort", whole.token_ids[:kept].tolist())
    assert part.logprobs.tolist() == whole.logprobs[:kept].tolist()
    assert part.routes.tolist() == whole.routes[: 2 + kept - 1].tolist()
    if top_p < 1:
        assert part.support.offsets.tolist() == whole.support.offsets[: kept + 1].tolist()
        assert len(part.support.ids) == part.support.offsets[-1]


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_what_was_sampled_before_an_abort_is_the_start_of_the_whole_answer(tokens):
    sampler = sampler_of(model_of(0))
    prompts, params = [PROMPT, PROMPT[:2]], [SamplingParams(12, seed=3), SamplingParams(4, seed=5)]
    whole = sampler.generate(prompts, params)
    asked = iter(range(1, 100))
    parts = sampler.generate(prompts, params, lambda: next(asked) == tokens)
    for prompt, part, full in zip(prompts, parts, whole, strict=True):
        count = min(tokens, len(full.token_ids))
        assert part.token_ids.tolist() == full.token_ids[:count].tolist()
        assert part.logprobs.tolist() == full.logprobs[:count].tolist()
        assert part.finish_reason == (full.finish_reason if count == len(full.token_ids) else "abort")
        assert part.routes is not None
        assert full.routes is not None
        rows = len(prompt) + count - 1
        assert part.routes.tolist() == full.routes[:rows].tolist()


class Held(Sampler):
    """Its first batch stops after `AFTER` tokens until it is aborted."""

    AFTER = 4

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.reached = threading.Event()

    def generate(self, prompts, params, should_abort=None):
        asked = iter(range(1, 1000))

        def hold() -> bool:
            if next(asked) == self.AFTER and not self.reached.is_set():
                self.reached.set()
                while not should_abort():
                    pass
            return should_abort()

        return super().generate(prompts, params, hold)


def logprobs_of(model: ReferenceModel, token_ids: np.ndarray) -> np.ndarray:
    """[s]: entry j is log p(token j | tokens before j) under the plain model; 0 for the first."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model.forward_packed(ids, torch.tensor([0, len(ids)])).logits.double()
    chosen = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()])


def test_an_answer_over_an_update_says_which_policy_chose_each_token():
    old, new = model_of(0), model_of(1)
    sampler = sampler_of(old, Held)
    assert isinstance(sampler, Held)
    engine = LocalEngine(LocalEngineConfig(pause_mode="abort"), sampler=sampler, policy_version=7)
    environment = SingleTurn(SingleTurnConfig(), decode=str, max_context_tokens=64)
    prompt = Prompt("d/0", PROMPT, None, "d")
    named = list(new.state_dict().items())

    async def main():
        episode = asyncio.create_task(environment.run(prompt, engine, SamplingParams(12, seed=3), "d/0#0"))
        assert await asyncio.to_thread(sampler.reached.wait, SECONDS)
        await engine.pause()
        await engine.update_weights(WeightBucket(8, named, True, checksum(named)))
        await engine.resume()
        return await episode

    trajectory = asyncio.run(main())
    engine.close()
    start, middle, end = len(PROMPT), len(PROMPT) + Held.AFTER, len(PROMPT) + 12
    assert trajectory.version_spans == ((start, middle, 7), (middle, end, 8))
    assert trajectory.finish_reason == "length"
    whole = sampler_of(old).generate([PROMPT], [SamplingParams(12, seed=3)])[0]
    assert trajectory.token_ids[start:middle].tolist() == whole.token_ids[: Held.AFTER].tolist()
    expected = np.concatenate(
        [logprobs_of(old, trajectory.token_ids)[start:middle], logprobs_of(new, trajectory.token_ids)[middle:end]]
    )
    assert np.abs(trajectory.rollout_logprobs[start:] - expected).max() < TOLERANCE
    assert trajectory.has_route is not None
    assert trajectory.has_route.tolist() == [True] * (end - 1) + [False]


def test_an_unknown_pause_mode_is_refused():
    with pytest.raises(RolloutError, match=r"pause_mode='retract', but must be one of wait, abort"):
        LocalEngine(LocalEngineConfig(pause_mode="retract"), sampler=sampler_of(model_of(0)))
