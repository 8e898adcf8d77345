"""The learner against transformers' Qwen3MoeForCausalLM: log-probabilities, entropies, routes and gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from moerl.types import PackedSupport

NEEDS_OLD = frozenset({"old_logprobs"})


def hf_scores(model, micro, *, temperature=1.0):
    """(logprobs [t], entropy [t], router logits [t, l, e]) sequence by sequence, with gradient."""
    logprobs, entropies, routers = [], [], []
    bounds = micro.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        ids = micro.token_ids[start:stop][None]
        out = model(ids, output_router_logits=True)
        logits = out.logits[0] / temperature
        logq = torch.log_softmax(logits, -1)
        entropy = -(logq.exp() * logq).sum(-1)
        logprobs += [logits.new_zeros(1), logq[:-1].gather(-1, ids[0, 1:, None])[:, 0]]
        entropies += [logits.new_zeros(1), entropy[:-1]]
        routers.append(torch.stack([r.view(stop - start, -1) for r in out.router_logits], 1))
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(routers)


def hf_gradients(model, policy, micro, loss):
    """Autograd through transformers, under on-disk names."""
    model.zero_grad()
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for e, (gate, up) in enumerate(part.chunk(2) for part in grad):
                found[f"{stem}.{e}.gate_proj.weight"], found[f"{stem}.{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            found |= {f"{stem}.{e}.down_proj.weight": part for e, part in enumerate(grad)}
        else:
            found[name] = grad
    return found


def assert_same_gradients(ours, theirs, tolerance=2e-5):
    assert ours.keys() == theirs.keys()
    scale = max(float(g.abs().max()) for g in theirs.values())
    assert scale > 0
    worst = {name: float((ours[name] - theirs[name]).abs().max()) / scale for name in theirs}
    name = max(worst, key=worst.get)
    assert worst[name] < tolerance, (name, worst[name])


@pytest.fixture(scope="module")
def policy(kit, tiny_folder):
    return kit.make_policy(tiny_folder)


@pytest.fixture(scope="module")
def micro(kit):
    return kit.make_micro([5, 1, 17, 9, 2])


def test_logprobs_and_routes_equal_transformers(policy, hf_model, micro):
    with torch.no_grad():
        expected, _, routers = hf_scores(hf_model, micro)
    assert (policy.logprobs(micro) - expected).abs().max() < 1e-5
    live = torch.nonzero(micro.mask & (micro.position_ids > 0))[:, 0] - 1
    (stats,) = policy.observe([micro])
    assert (stats.log_probs - torch.log_softmax(routers[live], -1)).abs().max() < 1e-5
    assert torch.equal(stats.own_routes.sort(-1).values, routers[live].topk(3, -1).indices.sort(-1).values)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_temperature_divides_logits(policy, hf_model, kit, temperature):
    micro = kit.make_micro([6, 11], temperature=temperature)
    with torch.no_grad():
        expected, _, _ = hf_scores(hf_model, micro, temperature=temperature)
    assert (policy.logprobs(micro) - expected).abs().max() < 1e-5


def test_mixed_temperatures_in_one_pack(policy, kit):
    cold, hot = kit.make_micro([7], temperature=0.5), kit.make_micro([7], temperature=2.0)
    both = kit.make_micro([7, 7])
    tokens = torch.cat([cold.token_ids, hot.token_ids])
    both = replace(both, token_ids=tokens, temperature=torch.cat([cold.temperature, hot.temperature]))
    expected = torch.cat([policy.logprobs(cold), policy.logprobs(hot)])
    assert (policy.logprobs(both) - expected).abs().max() < 1e-5


def test_packed_equals_one_by_one(policy, kit, micro):
    together = policy.logprobs(micro)
    bounds = micro.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        alone = replace(kit.make_micro([stop - start]), token_ids=micro.token_ids[start:stop])
        assert (policy.logprobs(alone) - together[start:stop]).abs().max() < 1e-5


def test_support_normalises_over_the_allowed_ids(policy, hf_model, kit):
    micro = kit.make_micro([4, 9])
    generator = torch.Generator().manual_seed(1)
    ids, counts = [], []
    for j in range(micro.num_tokens):
        is_open = not bool(micro.mask[j]) or j % 3 == 0
        allowed = [] if is_open else [int(micro.token_ids[j]), *torch.randperm(53, generator=generator)[:5].tolist()]
        ids += sorted(set(allowed))
        counts.append(len(set(allowed)))
    offsets = torch.tensor([0, *counts]).cumsum(0)
    got = policy.logprobs(replace(micro, support=PackedSupport(torch.tensor(ids), offsets)))
    plain = policy.logprobs(micro)
    bounds = micro.cu_seqlens.tolist()
    with torch.no_grad():
        logits = torch.cat([hf_model(micro.token_ids[a:b][None]).logits[0] for a, b in pairwise(bounds)])
    for j in range(micro.num_tokens):
        span = ids[int(offsets[j]) : int(offsets[j + 1])]
        if not span or int(micro.position_ids[j]) == 0:
            assert got[j] == plain[j]
            continue
        expected = torch.log_softmax(logits[j - 1][span], -1)[span.index(int(micro.token_ids[j]))]
        assert abs(float(got[j] - expected)) < 1e-5


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_nll_gradients_equal_autograd(kit, tiny_folder, hf_model, micro, recompute):
    policy = kit.make_policy(tiny_folder, recompute=recompute)
    objective = kit.Nll()
    ours = policy.gradients([micro], objective)
    logprobs, _, _ = hf_scores(hf_model, micro)
    loss = -(micro.weights.policy * torch.where(micro.mask, logprobs, 0)).sum()
    assert_same_gradients(ours, hf_gradients(hf_model, policy, micro, loss))


def test_sequence_ratio_and_entropy_gradients_equal_autograd(policy, kit, hf_model):
    micro = kit.make_micro([6, 13, 8], temperature=0.8)
    micro = replace(micro, old_logprobs=policy.logprobs(micro) - 0.1 * torch.rand(micro.num_tokens))
    ours = policy.gradients([micro], kit.SequenceRatio())
    logprobs, entropy, _ = hf_scores(hf_model, micro, temperature=0.8)
    from moerl.mcore.inputs import loss_inputs
    from moerl.mcore.step import TokenScores

    loss, _ = kit.SequenceRatio()(loss_inputs(micro, TokenScores(logprobs, entropy, None), kit.SequenceRatio.needs))
    assert_same_gradients(ours, hf_gradients(hf_model, policy, micro, loss))


def test_splitting_a_minibatch_into_micro_batches_changes_nothing(policy, kit):
    whole = kit.make_micro([6, 13, 8, 3])
    bounds = whole.cu_seqlens.tolist()
    parts = []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        part = kit.make_micro([stop - start], first_id=i)
        cut = slice(start, stop)
        weights = type(whole.weights).shared(whole.weights.policy[cut])
        parts.append(
            replace(
                part,
                token_ids=whole.token_ids[cut],
                advantages=whole.advantages[cut],
                mask=whole.mask[cut],
                weights=weights,
            )
        )
    objective = kit.SequenceRatio()
    assert_same_gradients(policy.gradients(parts, objective), policy.gradients([whole], objective), tolerance=5e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        {"norm_topk_prob": False, "num_experts_per_tok": 2, "mlp_only_layers": []},
        {"tie_word_embeddings": True, "num_hidden_layers": 2, "mlp_only_layers": [0], "num_key_value_heads": 6},
    ],
    ids=["raw-gates", "tied-no-gqa"],
)
def test_other_shapes_of_the_family(kit, tmp_path, micro, overrides):
    from transformers import Qwen3MoeForCausalLM

    folder = kit.save_tiny_model(tmp_path, seed=11, **overrides)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    policy = kit.make_policy(folder)
    with torch.no_grad():
        expected, _, _ = hf_scores(model, micro)
    assert (policy.logprobs(micro) - expected).abs().max() < 1e-5
    ours = policy.gradients([micro], kit.Nll())
    logprobs, _, _ = hf_scores(model, micro)
    theirs = hf_gradients(model, policy, micro, -(micro.weights.policy * torch.where(micro.mask, logprobs, 0)).sum())
    assert_same_gradients(ours, theirs)


def test_export_is_the_folder_bit_for_bit_and_in_a_fixed_order(policy, tiny_folder):
    from moerl.models.hf_folder import HFFolder

    folder = HFFolder(tiny_folder)
    exported = list(policy.export())
    assert [name for name, _ in exported] == [name for name, _ in policy.export()]
    assert {name for name, _ in exported} == set(folder.names())
    for name, tensor in exported:
        assert torch.equal(tensor, folder.get(name)), name
