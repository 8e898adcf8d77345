"""The engine of supervised training answers with the file's own completions."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from moerl.errors import DataError
from moerl.rollout.engine import engines
from moerl.types import SamplingParams

FILE = {"sum/0": np.array([5, 6, 1], dtype=np.int32), "sum/1": np.array([], dtype=np.int32), "a#b/2": np.array([4])}


def answer(request_id: str, budget: int = 8):
    plugin = engines.get("dataset")
    engine = plugin.target(plugin.config_class(), completions=FILE, policy_version=4)
    return asyncio.run(engine.generate(np.array([9, 9]), SamplingParams(budget), request_id))


def test_the_completion_of_the_prompt_comes_back_without_logprobs_or_routes():
    for index in (0, 7):
        got = answer(f"sum/0#{index}")
        assert got.token_ids.tolist() == [5, 6, 1]
        assert np.isnan(got.logprobs).tolist() == [True] * 3
        assert got.logprobs.dtype == np.float32
        assert (got.finish_reason, got.policy_version) == ("stop", 4)
        assert got.routed_experts is None
        assert got.support is None
    assert answer("a#b/2#0").token_ids.tolist() == [4]


def test_a_completion_above_the_budget_is_cut_and_says_so():
    got = answer("sum/0#0", budget=2)
    assert (got.token_ids.tolist(), got.finish_reason) == ([5, 6], "length")
    assert answer("sum/0#0", budget=3).finish_reason == "stop"


@pytest.mark.parametrize("prompt_id", ["sum/1", "sum/2"])
def test_a_prompt_without_a_completion_is_named(prompt_id):
    with pytest.raises(DataError, match=f"prompt {prompt_id}: no completion in its file.*add the field `completion`"):
        answer(f"{prompt_id}#0")
