"""Latent attention in the learner, packed, against transformers: the kinds of it beside that of `tiny_models.KINDS`."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FULL_ROPE, YARN_ROPE, forward_of, make_model

from moerl.models.family import family_of
from moerl.models.hf_folder import InMemory, Unfused, read_config
from moerl.replay import compare_gradients

GROUPS = dict(n_routed_experts=12, num_experts_per_tok=4, n_group=3, topk_group=2, first_k_dense_replace=2)
BEST_OF_GROUPS = dict(
    n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, topk_method="group_limited_greedy"
)
VARIANTS = {
    "moonlight": ("latent", dict(q_lora_rank=None, rope_parameters=FULL_ROPE, n_shared_experts=1)),
    "groups": ("latent", dict(rope_parameters={**YARN_ROPE, "beta_fast": 1.0, "beta_slow": 1.0}, **GROUPS)),
    "wide": ("latent", dict(v_head_dim=20, rope_parameters={**YARN_ROPE, "mscale": None, "mscale_all_dim": 0.7})),
    "square": (
        "latent",
        dict(hidden_size=48, q_lora_rank=48, kv_lora_rank=48, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    ),
    "softmax_groups": ("latent_softmax", dict(q_lora_rank=None, routed_scaling_factor=1.0, **BEST_OF_GROUPS)),
}
"""Kind, and changes to it."""


@pytest.fixture(scope="module", params=VARIANTS)
def both(request, tmp_path_factory):
    """transformers' model, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    kind, changes = VARIANTS[request.param]
    model = make_model(kind, **changes)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def micro(kit):
    return kit.make_micro([5, 1, 70, 9], vocab=54)


def test_logprobs_and_routes_equal_transformers(kit, both, micro):
    model, folder = both
    policy = kit.make_policy(folder)
    with torch.no_grad():
        logprobs, routes = forward_of(model, micro)
    assert (policy.logprobs(micro) - logprobs).abs().max() < 1e-5
    live = torch.nonzero(micro.mask & (micro.position_ids > 0))[:, 0] - 1
    (stats,) = policy.observe([micro])
    assert torch.equal(stats.own_routes.sort(-1).values, routes[live].sort(-1).values)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_equal_transformers(kit, both, micro, recompute):
    model, folder = both
    model.zero_grad()
    logprobs, _ = forward_of(model, micro)
    (-(micro.weights.policy * torch.where(micro.mask, logprobs, 0)).sum()).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    hf = read_config(folder)
    theirs = Unfused(InMemory(grads), family_of(hf).fused_slices(hf))
    ours = kit.make_policy(folder, recompute=recompute).gradients([micro], kit.Nll())
    assert ours.keys() == theirs.names()
    gaps = compare_gradients({name: theirs.get(name) for name in ours}, ours)
    largest = max(gap.largest for gap in gaps)
    assert not [gap for gap in gaps if gap.difference > 1e-5 * gap.largest + 1e-6 * largest]


@pytest.mark.parametrize("variant", ["groups", "moonlight"])
def test_operations_are_those_that_torch_counts(kit, tmp_path, variant):
    """Attention apart, which fills values up to the width of queries."""
    from torch.utils.flop_counter import FlopCounterMode

    from moerl.models.flops import forward_flops

    kind, changes = VARIANTS[variant]
    make_model(kind, **changes).save_pretrained(tmp_path)
    policy, hf = kit.make_policy(tmp_path), read_config(tmp_path)
    with FlopCounterMode(display=False) as counter:
        policy.logprobs(kit.make_micro([24, 24], vocab=54))
    flops = forward_flops(family_of(hf).transformer_kwargs(hf), [24, 24])
    counted = {str(op): value for op, value in counter.get_flop_counts()["Global"].items()}
    assert sum(value for op, value in counted.items() if "attention" not in op) == flops.layers + flops.head
    assert flops.attention == 4 * 2 * 6 * (16 + 14) * 2 * 24 * 25 / 2
