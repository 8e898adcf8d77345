"""Sigmoid routers with a bias for the choice and group limits, shared experts: against transformers and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import KINDS, forward_of, make_model, save_model

from moerl.errors import ConfigError, NumericsError
from moerl.mcore import balancing
from moerl.mcore.router_replay import below_lost_groups
from moerl.models.family import family_of
from moerl.models.hf_export import write_hf_folder
from moerl.models.hf_folder import HFFolder, read_config
from moerl.reference.model import ReferenceModel
from moerl.replay import compare_gradients

NEEDS_OLD = frozenset({"old_logprobs"})
OTHERS = {
    "sigmoid": "sigmoid",
    "shared": "shared",
    "sigmoid_all_groups": "sigmoid",
    "shared_no_bias": "shared",
}
OVERRIDES = {
    "sigmoid_all_groups": {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": False},
    "shared_no_bias": {"qkv_bias": False, "norm_topk_prob": True, "mlp_only_layers": [1]},
}
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
MOE_LAYERS = (1, 2, 3)
"""Of the sigmoid kind."""


@pytest.fixture(scope="module", params=sorted(OTHERS))
def both(request, kit, tmp_path_factory):
    """transformers' model, and policies on the same folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(OTHERS[request.param], **OVERRIDES.get(request.param, {}))
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def sigmoid_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("sigmoid"), "sigmoid")


@pytest.fixture(scope="module")
def micro(kit):
    kind = KINDS["sigmoid"]
    return kit.with_routes(kit.make_micro([5, 1, 17, 9], vocab=54), kind.layers, kind.experts, kind.topk)


def test_logprobs_and_routes_equal_transformers(kit, both, micro):
    model, folder = both
    policy = kit.make_policy(folder)
    with torch.no_grad():
        logprobs, routes = forward_of(model, micro)
    assert (policy.logprobs(micro) - logprobs).abs().max() < 1e-5
    live = torch.nonzero(micro.mask & (micro.position_ids > 0))[:, 0] - 1
    (stats,) = policy.observe([micro])
    assert torch.equal(stats.own_routes.sort(-1).values, routes[live].sort(-1).values)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_equal_the_oracles_which_equal_transformers(kit, both, micro, recompute):
    model, folder = both
    oracle = ReferenceModel.from_pretrained(folder)
    logprobs, _ = forward_of(model, micro)
    out = torch.log_softmax(oracle.forward_packed(micro.token_ids, micro.cu_seqlens).logits, -1)
    own = out[:-1].gather(-1, micro.token_ids[1:, None])[:, 0]
    own = torch.cat([own.new_zeros(1), own])
    assert (own - logprobs)[micro.mask].abs().max() < 1e-5
    (-(micro.weights.policy * torch.where(micro.mask, own, 0)).sum()).backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in oracle.hf_state().items()}
    gaps = compare_gradients(wanted, kit.make_policy(folder, recompute=recompute).gradients([micro], kit.Nll()))
    largest = max(gap.largest for gap in gaps)
    assert not [gap for gap in gaps if gap.difference > 2e-5 * largest]


def test_export_is_the_folder_bit_for_bit(kit, both):
    _, folder = both
    source, exported = HFFolder(folder), dict(kit.make_policy(folder).export())
    assert exported.keys() == source.names()
    assert all(torch.equal(tensor, source.get(name)) for name, tensor in exported.items())


def test_weights_of_replayed_experts_are_the_routers_own(kit, sigmoid_folder, micro):
    """Sigmoids of the chosen over their sum, times the factor; neither bias nor groups have a say."""
    policy = kit.make_policy(sigmoid_folder, routing="R3")
    scored, metrics = policy.score(
        kit.make_step([micro], [replace(micro, sample_ids=(4, 5, 6, 7))]), NEEDS_OLD | {"router_shift"}
    )
    found = scored.minibatches[0][0]
    oracle = ReferenceModel.from_pretrained(sigmoid_folder)
    with torch.no_grad():
        out = oracle.forward_packed(micro.token_ids, micro.cu_seqlens, None, micro.routes, micro.has_route)
    logq = torch.log_softmax(out.logits, -1)[:-1].gather(-1, micro.token_ids[1:, None])[:, 0]
    assert (found.old_logprobs[1:] - logq)[micro.mask[1:]].abs().max() < 1e-5
    assert torch.equal(found.old_routes.long().sort(-1).values, out.own_routes.sort(-1).values)
    assert metrics["route/replay_coverage"].value() == 1.0
    active = torch.where(micro.has_route[:, None, None], micro.routes, found.old_routes)
    assert (found.old_router_logprobs - out.router_probs.log().gather(-1, active)).abs().max() < 1e-5


def test_the_bias_changes_the_choice_and_not_the_weights(kit, sigmoid_folder, tmp_path, micro):
    model = make_model("sigmoid")
    with torch.no_grad():
        for layer in MOE_LAYERS:
            model.state_dict()[BIAS.format(layer)].zero_()
    model.save_pretrained(tmp_path)
    biased, plain = kit.make_policy(sigmoid_folder, routing="R3"), kit.make_policy(tmp_path, routing="R3")
    everywhere = replace(micro, has_route=None)
    with_bias, without = (policy.observe([micro])[0].own_routes.sort(-1).values for policy in (biased, plain))
    assert (with_bias != without).any()
    step = kit.make_step([everywhere], [replace(everywhere, sample_ids=(4, 5, 6, 7))])
    old = [policy.score(step, NEEDS_OLD)[0].minibatches[0][0].old_logprobs for policy in (biased, plain)]
    assert torch.equal(old[0], old[1])


def biases(policy):
    return {n: t.clone() for n, t in policy.export() if n.endswith("correction_bias")}


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_the_bias_moves_by_the_setting_alone(kit, sigmoid_folder, micro, rate):
    policy = kit.make_policy(sigmoid_folder, model={"router_bias_update_rate": rate}, recompute="full")
    before = biases(policy)
    plain = replace(micro, routes=None, has_route=None)
    policy.gradients([plain], kit.Nll())
    policy.score(kit.make_step([plain]), frozenset({"old_logprobs", "router_shift"}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in biases(policy).items())
    with torch.no_grad():
        oracle = ReferenceModel.from_pretrained(sigmoid_folder)
        chosen = oracle.forward_packed(micro.token_ids, micro.cu_seqlens).own_routes
    policy.update(kit.make_step([plain]), kit.Nll())
    for index, layer in enumerate(MOE_LAYERS):
        load = torch.bincount(chosen[:, index].flatten(), minlength=12).float()
        wanted = before[BIAS.format(layer)] + rate * torch.sign(load.mean() - load)
        assert torch.equal(biases(policy)[BIAS.format(layer)], wanted)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_load_counts_every_token_once(kit, sigmoid_folder, micro, recompute, monkeypatch):
    """Twice for every token would move no bias otherwise, twice for some would."""
    seen = []
    monkeypatch.setattr(
        balancing, "get_updated_expert_bias", lambda loads, biases, *_, **__: seen.append(loads.clone()) or biases
    )
    policy = kit.make_policy(sigmoid_folder, model={"router_bias_update_rate": 0.01}, recompute=recompute)
    policy.update(kit.make_step([replace(micro, routes=None, has_route=None)]), kit.Nll())
    (loads,) = seen
    assert loads.sum(-1).tolist() == [len(micro.token_ids) * KINDS["sigmoid"].topk] * len(MOE_LAYERS)


def test_a_step_that_fails_leaves_the_bias_as_it_was(kit, sigmoid_folder, micro):
    class Broken:
        needs = frozenset()

        def __call__(self, x):
            return (x.logprobs * torch.nan).sum(), {}

    policy = kit.make_policy(sigmoid_folder, model={"router_bias_update_rate": 0.01})
    before = biases(policy)
    with pytest.raises(NumericsError):
        policy.update(kit.make_step([replace(micro, routes=None, has_route=None)]), Broken())
    assert all(torch.equal(tensor, before[name]) for name, tensor in biases(policy).items())


@pytest.mark.parametrize("routing", ["R2", "R3", "frozen_router", "frozen_router_bias"])
def test_a_moving_bias_is_refused_where_routers_do_not_choose(kit, sigmoid_folder, routing):
    with pytest.raises(ConfigError, match=r"router_bias_update_rate is 0\.01 with algorithm\.routing"):
        kit.make_policy(sigmoid_folder, routing=routing, model={"router_bias_update_rate": 0.01})


def test_a_moving_bias_is_refused_where_there_is_none(kit, tiny_folder):
    with pytest.raises(ConfigError, match="have no balancing bias"):
        kit.make_policy(tiny_folder, model={"router_bias_update_rate": 0.01})


def test_the_bias_is_float32_in_a_bf16_learner(kit, tmp_path):
    """Eight bits of a bias near 7 leave a handful of values, and other experts (sglang 37133, Megatron-LM 1482)."""
    model = make_model("sigmoid")
    state = model.state_dict()
    with torch.no_grad():
        for layer in MOE_LAYERS:
            state[BIAS.format(layer)].copy_(torch.linspace(6.8, 7.05, 12))
    model.save_pretrained(tmp_path / "from")
    policy = kit.make_policy(tmp_path / "from", params="bf16")
    policy.logprobs(kit.make_micro([7], vocab=54))
    exported = {name: tensor.clone() for name, tensor in policy.export()}
    source = HFFolder(tmp_path / "from")
    for layer in MOE_LAYERS:
        assert torch.equal(exported[BIAS.format(layer)], source.get(BIAS.format(layer)))
    assert exported["model.embed_tokens.weight"].dtype == torch.bfloat16
    hf = read_config(tmp_path / "from")
    kept = frozenset(name for rule in family_of(hf).weight_rules(hf) if rule.is_buffer for name in rule.hf_names)
    write_hf_folder(tmp_path / "to", exported.items(), tmp_path / "from", dtype=torch.bfloat16, kept_names=kept)
    assert torch.equal(HFFolder(tmp_path / "to").get(BIAS.format(1)), source.get(BIAS.format(1)))


def test_resume_restores_the_bias(kit, sigmoid_folder, tmp_path, micro):
    first = kit.make_policy(sigmoid_folder, model={"router_bias_update_rate": 0.01})
    first.update(kit.make_step([replace(micro, routes=None, has_route=None)]), kit.Nll())
    first.save(tmp_path)
    second = kit.make_policy(sigmoid_folder, model={"router_bias_update_rate": 0.01})
    second.load(tmp_path)
    mine, theirs = dict(first.export()), dict(second.export())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_an_expert_of_a_lost_group_was_as_far_off_as_its_group():
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.1, 0.5, 0.45, 0.95, 0.0]])  # groups of two: 1.7, 0.2, 0.95, 0.95
    scores[0, 7] = 0.001  # the last group wins over the third by 0.001
    own = torch.tensor([[0, 1, 6, 7]])
    standing = below_lost_groups(scores, own, 4, 2)
    assert torch.equal(standing[0, [0, 1, 6, 7]], scores[0, [0, 1, 6, 7]])
    assert standing[0, 4:6].tolist() == pytest.approx([0.0] * 2, abs=1e-6)
    assert standing[0, 2:4].tolist() == pytest.approx([-0.75] * 2, abs=1e-6)


def test_a_critic_of_this_kind_trains_and_holds_the_bias(kit, sigmoid_folder, micro):
    critic = kit.make_critic(sigmoid_folder)
    target = replace(micro, returns=micro.mask.float(), old_values=torch.zeros(micro.num_tokens))
    assert BIAS.format(1) not in critic.gradients([target])
    before = critic.export()
    critic.update(kit.make_step([target]))
    after = critic.export()
    assert torch.equal(after[BIAS.format(1)], before[BIAS.format(1)])
    assert not torch.equal(after["value_head.bias"], before["value_head.bias"])
