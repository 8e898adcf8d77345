"""The learner of every kind of model against transformers itself: logits, routes and gradients, alone."""

from __future__ import annotations

import pytest
import torch
from tiny_models import KINDS, forward_of, logits_of, logprobs_of, make_model, save_model
from whole_rows import logprobs_and_logits

from moerl.errors import ConfigError
from moerl.models.family import family_of
from moerl.models.hf_folder import HFFolder, InMemory, Unfused, read_config
from moerl.replay import compare_gradients


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """transformers' model, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def micro(kit):
    return kit.make_micro([5, 1, 17, 9], vocab=54)


def test_logits_and_routes_equal_transformers(kit, both, micro):
    """Megatron-LM 955: a softmax over the chosen and a choice after the softmax are two models."""
    model, folder = both
    policy = kit.make_policy(folder)
    with torch.no_grad():
        logits, routes = logits_of(model, micro)
    ours, rows = logprobs_and_logits(policy, micro)
    assert rows is not None
    assert rows.shape == logits.shape == (32, 54)
    assert (rows - logits).abs().max() < 1e-5
    assert (ours - logprobs_of(logits, micro)).abs().max() < 1e-5
    if not routes.numel():  # no experts
        return
    live = torch.nonzero(micro.mask & (micro.position_ids > 0))[:, 0] - 1
    (stats,) = policy.observe([micro])
    assert torch.equal(stats.own_routes.sort(-1).values, routes[live].sort(-1).values)


def test_rows_of_the_head_that_changed_places_show_in_the_logits(kit, tmp_path, micro):
    """A softmax over all of them is the same, so logprobs of other tokens are blind to it."""
    model = make_model("softmax")
    with torch.no_grad():
        logits, _ = logits_of(model, micro)
    first, second = sorted(set(range(54)) - set(micro.token_ids.tolist()))[:2]
    rows = model.lm_head.weight.data
    rows[[first, second]] = rows[[second, first]]
    model.save_pretrained(tmp_path)
    logprobs, wrong = logprobs_and_logits(kit.make_policy(tmp_path), micro)
    assert (logprobs - logprobs_of(logits, micro)).abs().max() < 1e-5
    gap = (wrong - logits).abs().amax(0)
    assert set(torch.nonzero(gap > 1e-3)[:, 0].tolist()) == {first, second}
    assert gap[[first, second]].min() > 0.1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_equal_transformers(kit, both, micro, recompute):
    model, folder = both
    hf = read_config(folder)
    model.zero_grad()
    logprobs, _ = forward_of(model, micro)
    (-(micro.weights.policy * torch.where(micro.mask, logprobs, 0)).sum()).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    family = family_of(hf)
    theirs = Unfused(InMemory(grads), family.fused_slices(hf))
    buffers = {name for rule in family.weight_rules(hf) if rule.is_buffer for name in rule.hf_names}
    wanted = {name: theirs.get(name) for name in HFFolder(folder).names() - buffers}
    gaps = compare_gradients(wanted, kit.make_policy(folder, recompute=recompute).gradients([micro], kit.Nll()))
    largest = max(gap.largest for gap in gaps)
    assert len(gaps) == len(wanted)
    assert largest > 0
    assert not [gap for gap in gaps if gap.difference > 1e-5 * gap.largest + 1e-6 * largest]


def test_export_is_the_folder_bit_for_bit(kit, both):
    _, folder = both
    source, exported = HFFolder(folder), dict(kit.make_policy(folder).export())
    assert exported.keys() == source.names()
    assert all(torch.equal(tensor, source.get(name)) for name, tensor in exported.items())


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("dense"), "dense")


@pytest.mark.parametrize("routing", ["R2", "R3", "frozen_router", "frozen_router_bias"])
def test_routing_is_refused_where_there_are_no_routers(kit, dense_folder, routing):
    with pytest.raises(ConfigError, match=f"algorithm.routing is {routing!r}, but .* has no experts; set it to none"):
        kit.make_policy(dense_folder, routing=routing)


def test_router_shift_is_refused_where_there_are_no_routers(kit, dense_folder):
    with pytest.raises(ConfigError, match=r"algorithm\.router_shift is on, but .* has no experts"):
        kit.make_policy(dense_folder, router_shift=True)


def test_llamas_scaling_is_in_the_forward(kit, tmp_path, micro):
    """The same weights with a plain rotary embedding are another model, by far more than rounding."""
    folder = save_model(tmp_path / "scaled", "llama")
    scaled = kit.make_policy(folder).logprobs(micro)
    plain = save_model(tmp_path / "plain", "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert (kit.make_policy(plain).logprobs(micro) - scaled).abs().max() > 1e-4


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("softmax", {}),
        ("dense", {}),
        ("shared", {"beta_fast": 2.0, "beta_slow": 0.01}),
        ("softmax", {"beta_fast": 2.0, "beta_slow": 0.01, "truncate": False}),
        ("dense", {"attn_factor": 0.8782488562869419, "attention_factor": 1.0}),
        ("dense", {"attn_factor": 1.5, "attention_factor": 1.7079441541679836}),
    ],
)
def test_yarn_beyond_the_original_length_equals_transformers(kit, tmp_path, micro, kind, more):
    """Sequences of 17 and 9 where the model was made for 8; an unstretched rotation is another model."""
    model = make_model(kind, rope_parameters={**YARN, **more})
    model.save_pretrained(tmp_path / "yarn")
    with torch.no_grad():
        logits, _ = logits_of(model, micro)
    _, rows = logprobs_and_logits(kit.make_policy(tmp_path / "yarn"), micro)
    assert (rows - logits).abs().max() < 1e-5
    plain = save_model(tmp_path / "plain", kind, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    _, other = logprobs_and_logits(kit.make_policy(plain), micro)
    assert (other - logits).abs().max() > 1e-3
