"""The likeliest tokens of every step are those of an independent float64 forward, with its logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.reference.model import ReferenceModel
from moerl.reference.sampling import Sampler
from moerl.types import SamplingParams

POLICY = "configs/demo/policy"
PROMPT = np.array([5, 9, 12, 7], dtype=np.int32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_are_those_of_the_oracle(temperature):
    params = [SamplingParams(max_new_tokens=8, temperature=temperature, seed=i, top_logprobs=4) for i in range(3)]
    oracle = ReferenceModel.from_pretrained(POLICY, torch.float64)
    for one in Sampler(POLICY).generate([PROMPT] * 3, params):
        assert one.top_logprobs is not None
        tokens = torch.from_numpy(np.concatenate([PROMPT, one.token_ids])).long()
        with torch.no_grad():
            logits = oracle.forward_packed(tokens, torch.tensor([0, len(tokens)])).logits / temperature
        rows = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
        values, ids = rows.topk(4)
        assert one.top_logprobs.ids.tolist() == ids.tolist()
        np.testing.assert_allclose(one.top_logprobs.logprobs, values.numpy(), atol=2e-5)
        chosen = rows.gather(-1, torch.from_numpy(one.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(one.logprobs, chosen.numpy(), atol=2e-5)


def test_without_asking_there_are_none():
    (one,) = Sampler(POLICY).generate([PROMPT], [SamplingParams(max_new_tokens=2, temperature=1.0, seed=0)])
    assert one.top_logprobs is None
