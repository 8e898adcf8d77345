"""The sampler runs every family as the plain model does: cache, fused weights and sorted experts change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from other_families import FAMILIES

from moerl.reference.config import ReferenceConfig
from moerl.reference.model import ReferenceModel
from moerl.reference.sampling import Sampler, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 38,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "intermediate_size": 30,
    "rope_theta": 10000.0,
}


def shape_of(family: str) -> dict[str, Any]:
    changes = FAMILIES[family]
    head = {"hidden_size": 36} if changes.get("head_dim", 1) is None else {}
    return {key: value for key, value in {**SHAPE, **changes, **head}.items() if value is not None}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_it_samples_by_the_plain_models_logprobs_and_routes(family: str) -> None:
    model = ReferenceModel.random(ReferenceConfig.from_dict(shape_of(family)), seed=0, std=0.2)
    sampler = Sampler(model.cfg)
    sampler.load_weights(model.state_dict().items())
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 38, int(rng.integers(1, 12))).astype(np.int32) for _ in range(6)]
    outs = sampler.generate(prompts, [SamplingParams(30, seed=i) for i in range(6)])
    for prompt, out in zip(prompts, outs, strict=True):
        ids = torch.tensor(np.concatenate([prompt, out.token_ids])).long()
        with torch.no_grad():
            whole = model.forward_packed(ids, torch.tensor([0, len(ids)]))
        logprobs = whole.logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[len(prompt) - 1 :, 0]
        np.testing.assert_allclose(out.logprobs, logprobs.numpy(), atol=1e-5)
        if not model.cfg.moe_layers:
            assert out.routes is None
            continue
        assert out.routes is not None
        np.testing.assert_array_equal(np.sort(out.routes, -1), whole.routes[:-1].sort(-1).values.numpy())
