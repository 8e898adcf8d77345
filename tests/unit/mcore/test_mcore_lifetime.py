"""A learner that nobody holds is gone, and with it the threads of its process groups."""

from __future__ import annotations

import gc
import weakref

import pytest
from tiny_models import save_model


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_trained_policy_goes_with_its_last_name(kit, tmp_path, kind, recompute):
    """A graph that a dispatcher keeps holds the model through nodes that no garbage collector sees."""
    from moerl.mcore.model import unwrap

    policy = kit.make_policy(save_model(tmp_path / "hf", kind), recompute=recompute)
    micros = [kit.make_micro([5, 9], first_id=0, seed=1), kit.make_micro([7, 4, 6], first_id=2, seed=2)]
    batch = kit.make_step([micros[0]], [micros[1]])
    scored, _ = policy.score(batch, frozenset({"old_logprobs"}))
    policy.update(scored, kit.SequenceRatio())
    model = weakref.ref(unwrap(policy._runner._chunks[0]))
    assert model() is not None
    del policy
    gc.collect()
    assert model() is None
