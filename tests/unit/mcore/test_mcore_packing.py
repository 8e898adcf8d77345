"""How a minibatch is packed changes nothing: budget of a micro-batch, order in a pack, order of the packs, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_samples import random_samples

from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.objective import build_objective
from moerl.algorithms.presets import PRESETS
from moerl.config.load import config_from_dict
from moerl.data.batch import build_step_batch
from moerl.data.packing import plan_packing
from moerl.metrics import to_floats
from moerl.types import PackPlan

LENGTHS = (9, 17, 6, 21, 12, 8, 29, 14)
SHAPE = {"layers": 2, "experts": 7, "topk": 3, "vocab": 53}
TOLERANCE = 2e-5


def packings():
    """By name: two minibatches with the same samples in each, packed differently."""

    def planned(budget):
        groups = [i // 2 for i in range(len(LENGTHS))]
        sizes = {"dp_size": 1, "num_minibatches": 2, "num_epochs": 1, "seed": 0}
        return plan_packing(LENGTHS, groups, LENGTHS, max_tokens_per_microbatch=budget, **sizes)

    middle = planned(40)
    backward = PackPlan(
        tuple(tuple(tuple(micro[::-1] for micro in rank[::-1]) for rank in ranks) for ranks in middle.assignment)
    )
    return {"whole": planned(1000), "middle": middle, "backward": backward, "smallest": planned(max(LENGTHS))}


def train(kit, folder, preset, routing, plan):
    values = {**PRESETS[preset].values, "preset": preset, "routing": routing}
    run = {"run": {"name": "x", "num_steps": 1}, "model": {"path": str(folder)}, "algorithm": values}
    section = config_from_dict(run).algorithm
    objective = build_objective(section)
    settings = {"router_shift": section.router_shift.enabled, "needs_reference": "ref_logprobs" in objective.needs}
    policy = kit.make_policy(folder, routing=routing, **settings)
    batch = build_step_batch(
        random_samples(np.random.default_rng(1), LENGTHS, SHAPE, constant=objective.constant_advantage),
        plan,
        dp_rank=0,
        weigh=lambda n, g: sequence_weights(section.aggregation, torch.from_numpy(n), torch.from_numpy(g)).numpy(),
        device="cpu",
        policy_version=0,
    )
    batch, metrics = policy.score(batch, objective.needs | {"old_logprobs"})
    grads = policy.gradients(batch.minibatches[0], objective)
    metrics |= policy.update(batch, objective)
    return to_floats(metrics), grads


@pytest.mark.parametrize(("preset", "routing"), [("grpo", "none"), ("gspo", "R3"), ("gmpo", "R2"), ("rspo", "R3")])
def test_packing_changes_neither_gradients_nor_metrics(kit, tiny_folder, preset, routing):
    plans = packings()
    counts = [sum(len(ranks[0]) for ranks in plan.assignment) for plan in plans.values()]
    assert counts == [2, 4, 4, 5]
    first, *others = (train(kit, tiny_folder, preset, routing, plan) for plan in plans.values())
    for metrics, grads in others:
        assert metrics.keys() == first[0].keys()
        for name, value in first[0].items():
            assert abs(metrics[name] - value) <= TOLERANCE * (1 + abs(value)), name
        for name, grad in first[1].items():
            assert (grads[name] - grad).abs().max() <= TOLERANCE * grad.abs().max() + 1e-9, name
