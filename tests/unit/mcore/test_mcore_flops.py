"""What the learner computes, by torch's own counter, is what the closed form says."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moerl.config.schema import ModelSection

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def forward_pairs(query, key, *args, out_val=None, **kwargs) -> int:
    """Torch's own formula, which the CPU's operator lacks: every query with every key."""
    batch, heads, length, width = query
    return 2 * 2 * batch * heads * length * key[2] * width


def backward_pairs(grad, query, key, *args, out_val=None, **kwargs) -> int:
    return 5 * forward_pairs(query, key) // 2


def product(into, left, right, *args, out_val=None, **kwargs) -> int:
    """Of addmm_, which the counter lacks too."""
    return 2 * left[0] * left[1] * right[1]


def count(work) -> tuple[int, int]:
    """(products, attention)."""
    mapping = dict(zip(ATTENTION, (forward_pairs, backward_pairs), strict=True))
    mapping[torch.ops.aten.addmm_] = product
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        work()
    by_op = counter.get_flop_counts()["Global"]
    attention = sum(flops for op, flops in by_op.items() if "scaled_dot_product" in str(op))
    return sum(by_op.values()) - attention, attention


def test_forward_and_backward_of_the_tiny_model(kit, tiny_folder):
    """Head and attention are computed once more in the backward pass.

    The counter takes a square where a causal mask leaves a half.
    """
    from moerl.mcore.model import read_source
    from moerl.models.flops import forward_flops

    policy = kit.make_policy(tiny_folder)
    micro = kit.make_micro([24, 24])
    flops = forward_flops(read_source(ModelSection(path=str(tiny_folder))).kwargs, [24, 24])
    square = flops.attention * 2 * 24 / 25
    products, attention = count(lambda: policy.logprobs(micro))
    assert products == flops.layers + flops.head
    assert attention == square
    products, attention = count(lambda: policy.gradients([micro], kit.Nll()))
    assert products == 3 * flops.layers + 4 * flops.head
    assert attention == 4.5 * square


@pytest.mark.parametrize(("mode", "parts"), [("none", "nothing"), ("selective", "experts"), ("full", "layers")])
def test_recomputation_computes_again_what_it_says(kit, tiny_folder, mode, parts):
    """Whole layers, or experts and attention of each, which is computed twice in any case."""
    from moerl.mcore.model import read_source
    from moerl.models.flops import forward_flops

    micro = kit.make_micro([24, 24])
    flops = forward_flops(read_source(ModelSection(path=str(tiny_folder))).kwargs, [24, 24])
    # Two layers have experts: each token's router, and three matrices of three experts.
    again = {"nothing": 0, "experts": 2 * 48 * 2 * 40 * (7 + 3 * 3 * 24), "layers": flops.layers}[parts]
    policy = kit.make_policy(tiny_folder, recompute=mode)
    products, attention = count(lambda: policy.gradients([micro], kit.Nll()))
    assert products == 3 * flops.layers + 4 * flops.head + again
    assert attention == (4.5 if mode == "none" else 5.5) * flops.attention * 2 * 24 / 25


def test_a_step_reports_the_operations_of_its_passes(kit, tiny_folder):
    """One scoring pass and one training pass over every minibatch; probes in between belong to no step."""
    from moerl.mcore.model import read_source
    from moerl.metrics import to_floats
    from moerl.models.flops import forward_flops

    policy = kit.make_policy(tiny_folder)
    micros = [kit.make_micro([5, 9]), kit.make_micro([7, 4, 6], first_id=2)]
    step = kit.make_step([micros[0]], [micros[1]])
    policy.observe(micros)
    scored, of_score = policy.score(step, frozenset({"old_logprobs"}))
    of_update = policy.update(scored, kit.SequenceRatio())
    once = forward_flops(read_source(ModelSection(path=str(tiny_folder))).kwargs, [5, 9, 7, 4, 6])
    assert to_floats(of_score)["perf/learn_flops"] == once.forward
    assert to_floats(of_update)["perf/learn_flops"] == 3 * once.forward
