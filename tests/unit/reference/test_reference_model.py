"""The oracle: held equal to transformers, to itself under packing and padding, and to hand arithmetic under replay."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from other_families import CLASSES, FAMILIES
from safetensors.torch import save_file
from transformers import Glm4MoeConfig

from moerl.errors import CheckpointError, ConfigError, DataError
from moerl.models.family import family_of
from moerl.models.hf_folder import InMemory, Unfused, read_config
from moerl.reference.config import ReferenceConfig
from moerl.reference.loading import read_weights
from moerl.reference.model import ReferenceModel

SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 13,
    "norm_topk_prob": True,
    "rope_theta": 5000.0,
}
VARIANTS = {
    "plain": {},
    "raw_gates": {"norm_topk_prob": False},
    "tied": {"tie_word_embeddings": True},
    "one_dense_layer": {"mlp_only_layers": [1]},
    "every_second": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "one_expert_each": {"num_experts_per_tok": 1},
    "all_experts": {"num_experts_per_tok": 7},
}


def config(**changes) -> ReferenceConfig:
    return ReferenceConfig.from_dict({**SHAPE, **changes})


@pytest.fixture(params=sorted(VARIANTS | FAMILIES))
def pair(request, tmp_path):
    """transformers' model and ours, of the same saved folder."""
    fields = {**SHAPE, **(VARIANTS | FAMILIES)[request.param]}
    fields = {name: value for name, value in fields.items() if value is not None}
    theta = fields.pop("rope_theta")
    rope = fields.pop("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    if "partial_rotary_factor" in fields:
        rope["partial_rotary_factor"] = fields.pop("partial_rotary_factor")
    config_class, model_class = CLASSES[fields.pop("model_type")]
    if config_class is Glm4MoeConfig:
        fields.pop("num_experts")
    torch.manual_seed(0)
    theirs = model_class(config_class(**fields, rope_parameters=rope)).eval()
    if "num_experts_per_tok" in fields:
        theirs.set_experts_implementation("eager")  # the default, grouped_mm, refuses odd widths
    theirs.get_input_embeddings().padding_idx = None  # OLMoE's has no gradient
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():  # norms off 1, routers far from uniform
            tensor.add_(torch.randn_like(tensor) * (0.3 if name.endswith("correction_bias") else 0.2))
    theirs.save_pretrained(tmp_path)
    return theirs, ReferenceModel.from_pretrained(tmp_path)


def test_equals_transformers_in_logits_routes_and_gradients(pair, tmp_path):
    theirs, ours = pair
    ids = torch.randint(0, 37, (3, 11), generator=torch.Generator().manual_seed(1))
    chosen = []
    gates = [module for name, module in theirs.named_modules() if name.endswith("mlp.gate")]
    handles = [gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for gate in gates]
    has_experts = bool(ours.cfg.moe_layers)
    out, expected = ours(ids), theirs(ids, **({"output_router_logits": True} if has_experts else {}))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-5, rtol=1e-5)
    if has_experts:
        router = torch.stack([part.view(3, 11, -1) for part in expected.router_logits if part is not None], dim=2)
        torch.testing.assert_close(out.router_logits, router, atol=1e-5, rtol=1e-5)
        theirs_chosen = torch.stack([part.view(3, 11, -1) for part in chosen], dim=2).sort(-1).values
        torch.testing.assert_close(out.own_routes.sort(-1).values, theirs_chosen)
        torch.testing.assert_close(out.routes, out.own_routes)
    assert out.routes.shape[2] == len(ours.cfg.moe_layers)

    weight = torch.randn(out.logits.shape, generator=torch.Generator().manual_seed(2))
    (out.logits * weight).sum().backward()
    (expected.logits * weight).sum().backward()
    hf = read_config(tmp_path)
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    found = Unfused(InMemory(found), family_of(hf).fused_slices(hf))
    for name, parameter in ours.hf_state().items():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(grad, found.get(name), atol=2e-4, rtol=1e-4)


def test_hf_state_has_the_names_of_the_saved_file(pair, tmp_path):
    _, ours = pair
    saved = {name for name, _ in read_weights(tmp_path)}
    assert {name for name in saved if name.endswith("correction_bias")} == {name for name, _ in ours.named_buffers()}
    assert set(ours.hf_state()) == saved - {name for name, _ in ours.named_buffers()} - (
        {"lm_head.weight"} if ours.cfg.tied_embeddings else set()
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_padded_and_single_sequences_agree(side):
    model = ReferenceModel.random(config(), seed=0, std=0.3)
    rows = [torch.randint(0, 37, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 9, 4)]
    singles = [model.forward_packed(row, torch.tensor([0, len(row)])) for row in rows]
    packed = model.forward_packed(torch.cat(rows), torch.tensor([0, 1, 10, 14]))
    for field in ("logits", "router_logits", "routes"):
        torch.testing.assert_close(getattr(packed, field), torch.cat([getattr(one, field) for one in singles]))
    ids = torch.zeros(3, 9, dtype=torch.int64)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(9 - len(row), 9)
        ids[index, place], mask[index, place] = row, True
    padded = model(ids, mask)
    torch.testing.assert_close(padded.logits[mask], packed.logits)
    torch.testing.assert_close(padded.routes[mask], packed.routes)
    assert padded.logits[~mask].abs().max() == 0


def test_a_later_token_and_another_sequence_do_not_reach_back():
    model = ReferenceModel.random(config(), seed=0, std=0.3)
    ids, cuts = torch.arange(12), torch.tensor([0, 7, 12])
    before = model.forward_packed(ids, cuts).logits
    changed = ids.clone()
    changed[5] = 30
    after = model.forward_packed(changed, cuts).logits
    same = (before - after).abs().amax(-1) < 1e-5
    assert same.tolist() == [True] * 5 + [False] * 2 + [True] * 5


def test_replayed_experts_get_gates_of_the_current_scores():
    """One layer by hand: y = sum over the replayed set of q_e / sum q * MLP_e(x)."""
    for norm in (True, False):
        model = ReferenceModel.random(config(num_hidden_layers=1, norm_topk_prob=norm), seed=0, std=0.4)
        moe = model.model.layers[0].mlp
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
        replay = torch.tensor([[6, 0, 3]] * 5)
        y, logits, chosen, own = moe(x, replay, None)
        q = logits.softmax(-1)
        by_hand = torch.zeros_like(x)
        for e in (0, 3, 6):
            expert = moe.experts[e]
            inner = F.silu(x @ expert.gate_proj.weight.T) * (x @ expert.up_proj.weight.T)
            share = q[:, e] / (q[:, [0, 3, 6]].sum(-1) if norm else 1.0)
            by_hand += share[:, None] * (inner @ expert.down_proj.weight.T)
        torch.testing.assert_close(y, by_hand, atol=1e-6, rtol=1e-5)
        assert torch.equal(chosen, replay)
        assert not torch.equal(own.sort(-1).values, replay.sort(-1).values)


def test_gates_of_a_replayed_set():
    """Logits (2.1, .7, .9, -1): the router's own two experts, and a recorded pair that it would not choose."""
    model = ReferenceModel.random(config(num_hidden_layers=1, norm_topk_prob=True), seed=0, std=0.4)
    moe = model.model.layers[0].mlp
    logits = torch.full((len(moe.experts),), -50.0)
    logits[:4] = torch.tensor([2.1, 0.7, 0.9, -1.0])
    x = torch.randn(1, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        moe.gate.weight.copy_(logits[:, None] * x / x.square().sum())
    outputs = [expert.down_proj(F.silu(expert.gate_proj(x)) * expert.up_proj(x)) for expert in moe.experts[:3]]
    for chosen, (first, second) in (((0, 2), (0.768525, 0.231475)), ((0, 1), (0.802184, 0.197816))):
        y, *_ = moe(x, torch.tensor([chosen]), None)
        torch.testing.assert_close(y, first * outputs[0] + second * outputs[chosen[1]], atol=2e-6, rtol=1e-5)


def test_replaying_its_own_routes_changes_nothing_and_gradient_reaches_the_router():
    model = ReferenceModel.random(config(), seed=1, std=0.3)
    ids, cuts = torch.randint(0, 37, (13,), generator=torch.Generator().manual_seed(3)), torch.tensor([0, 13])
    free = model.forward_packed(ids, cuts)
    replayed = model.forward_packed(ids, cuts, routes=free.routes.flip(-1).to(torch.uint8))
    torch.testing.assert_close(replayed.logits, free.logits)
    replayed.logits.square().sum().backward()
    assert model.hf_state()["model.layers.0.mlp.gate.weight"].grad.abs().max() > 0


def test_rows_without_a_route_choose_for_themselves():
    model = ReferenceModel.random(config(), seed=1, std=0.3)
    ids, cuts = torch.arange(8), torch.tensor([0, 8])
    free = model.forward_packed(ids, cuts)
    other = (free.routes + 1) % 7
    has_route = torch.tensor([True] * 7 + [False])
    mixed = model.forward_packed(ids, cuts, routes=other, has_route=has_route)
    assert torch.equal(mixed.routes[:7], other[:7])
    assert torch.equal(mixed.routes[7], mixed.own_routes[7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:5], r"shape \(5, 3, 3\).*need \(8, 3, 3\)"),
        (lambda r: r * 0 + 7, "experts 7 to 7, the model has 0 to 6"),
        (lambda r: r * 0 - 1, "experts -1 to -1"),
    ],
)
def test_impossible_routes_are_refused(change, message):
    model = ReferenceModel.random(config(), seed=1)
    routes = torch.zeros(8, 3, 3, dtype=torch.int64)
    with pytest.raises(DataError, match=message):
        model.forward_packed(torch.arange(8), torch.tensor([0, 8]), routes=change(routes))


@pytest.mark.parametrize("cuts", [[0, 7], [1, 8], [0, 4, 4, 8], [0, 9], [0]])
def test_cuts_that_are_no_sequences_are_refused(cuts):
    with pytest.raises(DataError, match="does not cut 8 tokens"):
        ReferenceModel.random(config(), seed=1).forward_packed(torch.arange(8), torch.tensor(cuts))


def test_float64_is_the_same_function():
    single = ReferenceModel.random(config(), seed=0, std=0.2)
    double = ReferenceModel.random(config(), seed=0, std=0.2, dtype=torch.float64)
    double.load_weights((name, p.detach()) for name, p in single.hf_state().items())
    ids = torch.arange(10)[None]
    assert double(ids).logits.dtype == torch.float64
    torch.testing.assert_close(double(ids).logits.float(), single(ids).logits, atol=1e-5, rtol=1e-5)


def test_config_reads_both_generations_of_transformers():
    new = {k: v for k, v in SHAPE.items() if k not in ("rope_theta", "num_experts")}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "num_local_experts": 7}
    assert ReferenceConfig.from_dict(new) == config()
    assert config(mlp_only_layers=[0], decoder_sparse_step=1).moe_layers == (1, 2)
    without = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    assert ReferenceConfig.from_dict(without).head_dim == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type='gemma'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok=8"),
        ({"num_experts": None}, "num_experts"),
        ({"num_key_value_heads": 4}, "no multiple"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_what_qwen3_coder_names_is_what_the_others_have():
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert config(**coder) == config(**dict.fromkeys(coder)) == config()


@pytest.mark.parametrize(
    "changes", [{"qkv_bias": True}, {"shared_expert_intermediate_size": 8}, {"use_qk_norm": False}]
)
def test_a_qwen3_that_is_another_model_is_refused(changes):
    (name,) = changes
    with pytest.raises(ConfigError, match=f"{name}={changes[name]} is not implemented"):
        config(**changes)


def test_a_missing_key_file_or_json_is_named(tmp_path):
    absent = ("hidden_size", "num_experts_per_tok")
    with pytest.raises(ConfigError, match="hidden_size, num_experts_per_tok missing"):
        ReferenceConfig.from_dict({k: v for k, v in SHAPE.items() if k not in absent})
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        ReferenceConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        ReferenceConfig.from_folder(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A folder in two shards, and the model it was written from."""
    model = ReferenceModel.random(config(), seed=5)
    state = {name: p.detach().clone() for name, p in model.hf_state().items()}
    names = sorted(state)
    shards = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path, model, state


def test_sharded_folders_load_bit_for_bit(folder):
    path, model, _ = folder
    loaded = ReferenceModel.from_pretrained(path)
    assert all(torch.equal(p, model.hf_state()[name]) for name, p in loaded.hf_state().items())


def test_a_lost_shard_is_named(folder):
    path, _, _ = folder
    (path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors named in model\.safetensors\.index\.json but not there"):
        ReferenceModel.from_pretrained(path)


def test_a_truncated_file_is_named(folder):
    path, _, _ = folder
    file = path / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read"):
        ReferenceModel.from_pretrained(path)


def test_a_folder_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        ReferenceModel.from_pretrained(tmp_path)


def _drop(state):
    state.pop("model.layers.2.mlp.experts.4.up_proj.weight")


def _add(state):
    state["model.layers.0.mlp.gate.bias"] = torch.zeros(7)


def _reshape(state):
    state["model.norm.weight"] = torch.zeros(25)


def _retype(state):
    state["model.norm.weight"] = torch.zeros(24, dtype=torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, r"1 parameters unfilled, first model\.layers\.2\.mlp\.experts\.4\.up_proj"),
        (_add, r"1 names that this model has not, first model\.layers\.0\.mlp\.gate\.bias"),
        (_reshape, r"model\.norm\.weight: shape \(25,\) found, config\.json asks for \(24,\)"),
        (_retype, "dtype torch.int8 found"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(folder, damage, message):
    _, model, state = folder
    damaged = {name: torch.full_like(tensor, float("nan")) for name, tensor in state.items()}
    damage(damaged)
    with pytest.raises(CheckpointError, match=message):
        model.load_weights(damaged.items())
    assert all(torch.equal(p, state[name]) for name, p in model.hf_state().items())


def test_a_name_sent_twice_is_refused(folder):
    _, model, state = folder
    with pytest.raises(CheckpointError, match="came twice"):
        model.load_weights([*state.items(), ("model.norm.weight", torch.ones(24))])
