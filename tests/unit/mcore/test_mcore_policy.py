"""Updates, freezing, reference, checkpoints and the errors of the learner."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from moerl.errors import CheckpointError, ConfigError, DataError, NumericsError

NEEDS_OLD = frozenset({"old_logprobs"})


def weights(policy):
    return {name: tensor.clone() for name, tensor in policy.export()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def batch(kit):
    micros = [kit.make_micro([5, 9], first_id=0, seed=1), kit.make_micro([7, 4, 6], first_id=2, seed=2)]
    return kit.make_step([micros[0]], [micros[1]])


def run(policy, kit, batch, steps, objective=None):
    """Metrics of `steps` updates, without times."""
    from moerl.metrics import to_floats

    found = []
    for _ in range(steps):
        scored, metrics = policy.score(batch, NEEDS_OLD)
        found.append(to_floats(metrics) | to_floats(policy.update(scored, objective or kit.SequenceRatio())))
    return found


def test_sgd_step_is_the_gradient_times_the_rate(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder, optim={"name": "sgd", "lr": 0.1, "clip_grad_norm": 0.0})
    before = weights(policy)
    one = replace(batch, minibatches=batch.minibatches[:1], num_score_minibatches=1)
    grads = policy.gradients(one.minibatches[0], kit.Nll())
    metrics = policy.update(one, kit.Nll())
    after = weights(policy)
    for name, grad in grads.items():
        assert (after[name] - (before[name] - 0.1 * grad)).abs().max() < 1e-6, name
    norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
    assert metrics["optim/grad_norm"].value() == pytest.approx(float(norm), rel=1e-5)
    assert policy.version == 1


def test_clipping_bounds_the_step(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder, optim={"name": "sgd", "lr": 1.0, "clip_grad_norm": 0.01})
    before = weights(policy)
    policy.update(replace(batch, minibatches=batch.minibatches[:1], num_score_minibatches=1), kit.Nll())
    moved = torch.stack([(t - before[n]).double().square().sum() for n, t in policy.export()]).sum().sqrt()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_adam_equals_torch_adamw_on_the_same_gradients(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder, optim={"lr": 1e-3, "weight_decay": 0.1, "clip_grad_norm": 0.0})
    twin = {name: torch.nn.Parameter(t) for name, t in weights(policy).items()}
    groups = [
        {"params": [p for p in twin.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in twin.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for mini in batch.minibatches:
        for name, grad in policy.gradients(mini, kit.Nll()).items():
            twin[name].grad = grad
        optimizer.step()
        policy.update(replace(batch, minibatches=(mini,), num_score_minibatches=1), kit.Nll())
    for name, tensor in policy.export():
        assert (tensor - twin[name]).abs().max() < 1e-6, name


class Poison:
    """An objective that turns bad at one call."""

    needs = frozenset()

    def __init__(self, at, value):
        self.calls, self.at, self.value = 0, at, value

    def __call__(self, x):
        self.calls += 1
        loss = -(x.weights.policy * torch.where(x.mask, x.logprobs, 0)).sum()
        return (loss * self.value if self.calls == self.at else loss), {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_moves_nothing(kit, tiny_folder, batch, value):
    policy = kit.make_policy(tiny_folder)
    one = replace(batch, minibatches=(batch.minibatches[0] + batch.minibatches[1],), num_score_minibatches=1)
    policy.update(one, kit.Nll())
    before, version = weights(policy), policy.version
    with pytest.raises(NumericsError, match=r"loss (nan|inf) and gradient norm nan: one is not finite"):
        policy.update(one, Poison(2, value))
    assert same(before, weights(policy))
    assert policy.version == version
    twin = kit.make_policy(tiny_folder)
    run(twin, kit, one, 1, kit.Nll())
    assert same(before, weights(twin))
    policy.update(one, kit.Nll())
    twin.update(one, kit.Nll())
    assert same(weights(policy), weights(twin))


def test_a_loss_that_is_not_finite_says_what_the_step_had_done_before(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder)
    with pytest.raises(NumericsError, match=r"^minibatch 1 of 2 of the policy: .*no minibatch of this step was appl"):
        policy.update(batch, Poison(1, float("nan")))
    calls = len(batch.minibatches[0]) + 1
    with pytest.raises(NumericsError, match=r"^minibatch 2 of 2 of the policy: .*minibatch 1 of this step had been"):
        policy.update(batch, Poison(calls, float("nan")))


def test_weights_that_are_not_finite_are_not_saved(kit, tiny_folder, tmp_path):
    policy = kit.make_policy(tiny_folder)
    dict(policy.export())["model.norm.weight"].data[3] = float("inf")
    with pytest.raises(NumericsError, match=r"weights are not finite \(.*layernorm.*no checkpoint was written"):
        policy.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_gradient_that_is_not_finite_moves_nothing(kit, tiny_folder, batch):
    class Spike:
        needs = frozenset()

        def __call__(self, x):
            return torch.sqrt(x.logprobs - x.logprobs.detach()).sum(), {}

    policy = kit.make_policy(tiny_folder)
    before = weights(policy)
    with pytest.raises(NumericsError, match=r"loss 0\.0 and gradient norm nan"):
        policy.update(batch, Spike())
    assert same(before, weights(policy))


def test_a_minibatch_without_live_tokens_is_skipped(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder)
    policy.update(batch, kit.Nll())
    dead = tuple(replace(m, mask=torch.zeros_like(m.mask)) for m in batch.minibatches[1])
    before = weights(policy)
    metrics = policy.update(replace(batch, minibatches=(dead,), num_score_minibatches=1), kit.Nll())
    assert same(before, weights(policy))
    assert metrics["optim/skipped_minibatches"].value() == 1


def test_frozen_router_keeps_its_bits(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder, routing="frozen_router", optim={"lr": 0.01, "weight_decay": 0.1})
    before = weights(policy)
    run(policy, kit, batch, 2)
    after = weights(policy)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name for name in after if name.endswith("mlp.gate.weight")} == after.keys() - moved


def test_freeze_patterns(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder, model={"freeze": [r"model\.embed_tokens\.weight", r".*\.q_norm\.weight"]})
    before = weights(policy)
    run(policy, kit, batch, 1)
    frozen = {name for name, t in policy.export() if torch.equal(t, before[name])}
    assert frozen == {"model.embed_tokens.weight", *(f"model.layers.{i}.self_attn.q_norm.weight" for i in range(3))}
    with pytest.raises(ConfigError, match=r"covers .*q_proj.* but Megatron fuses"):
        kit.make_policy(tiny_folder, model={"freeze": [r".*q_proj\.weight"]})
    with pytest.raises(ConfigError, match="'embed' matches no weight"):
        kit.make_policy(tiny_folder, model={"freeze": ["embed"]})


def test_reference_is_the_first_weights(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder, needs_reference=True)
    first, _ = policy.score(batch, NEEDS_OLD | {"ref_logprobs"})
    micro = first.minibatches[0][0]
    assert torch.equal(micro.ref_logprobs, micro.old_logprobs)
    run(policy, kit, batch, 2)
    now = weights(policy)
    later, _ = policy.score(batch, NEEDS_OLD | {"ref_logprobs"})
    assert torch.equal(later.minibatches[0][0].ref_logprobs, micro.ref_logprobs)
    assert not torch.equal(later.minibatches[0][0].old_logprobs, micro.old_logprobs)
    assert same(now, weights(policy))
    with pytest.raises(ConfigError, match="needs_reference=False"):
        kit.make_policy(tiny_folder).score(batch, frozenset({"ref_logprobs"}))


def test_later_epochs_get_the_same_old_logprobs_under_another_packing(kit, tiny_folder, batch):
    first, second = batch.minibatches[0][0], batch.minibatches[1][0]
    cuts = {
        i: (m, slice(*m.cu_seqlens[k : k + 2].tolist())) for m in (first, second) for k, i in enumerate(m.sample_ids)
    }
    order = [3, 0, 4]
    repacked = replace(kit.make_micro([cuts[i][1].stop - cuts[i][1].start for i in order]), sample_ids=tuple(order))
    repacked = replace(repacked, token_ids=torch.cat([cuts[i][0].token_ids[cuts[i][1]] for i in order]))
    epochs = replace(batch, minibatches=(*batch.minibatches, (repacked,)))
    scored, _ = kit.make_policy(tiny_folder).score(epochs, NEEDS_OLD | {"router_shift"})
    bounds = repacked.cu_seqlens.tolist()
    for k, i in enumerate(order):
        source = next(m for mini in scored.minibatches[:2] for m in mini if i in m.sample_ids)
        filled = scored.minibatches[2][0]
        for name in ("old_logprobs", "old_routes", "old_router_logprobs"):
            assert torch.equal(getattr(filled, name)[bounds[k] : bounds[k + 1]], getattr(source, name)[cuts[i][1]])


def test_one_minibatch_skips_the_old_pass_and_measures_in_update(kit, tiny_folder, batch):
    micro = kit.with_routes(batch.minibatches[0][0], 2, 7, 3)
    one = replace(batch, minibatches=((micro,),), num_score_minibatches=1)
    policy = kit.make_policy(tiny_folder)
    scored, metrics = policy.score(one, NEEDS_OLD)
    assert metrics == {}
    assert scored.minibatches[0][0].old_logprobs is None
    direct = policy.update(scored, kit.SequenceRatio())
    pair = kit.make_step([micro], [replace(micro, sample_ids=(5, 6))])
    _, expected = kit.make_policy(tiny_folder).score(pair, NEEDS_OLD)
    for name in ("mm/logp_abs_max", "mm/k3", "route/set_change", "load/entropy", "route/max_margin_of_changed"):
        assert direct[name].value() == pytest.approx(expected[name].value()), name
    assert not [name for name in direct if name.startswith("route_update")], "no update lies between old and current"


def test_an_engine_without_routes_is_compared_by_its_logprobs_and_a_file_by_nothing(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder)
    micros = [replace(micro, routes=None, has_route=None) for mini in batch.minibatches for micro in mini]
    _, metrics = policy.score(kit.make_step(*[[micro] for micro in micros]), frozenset())
    assert metrics["mm/logp_abs_max"].value() > 0
    assert not [name for name in metrics if name.startswith("route/")]
    unsampled = [replace(m, rollout_logprobs=torch.full_like(m.rollout_logprobs, torch.nan)) for m in micros]
    _, metrics = policy.score(kit.make_step(*[[micro] for micro in unsampled]), NEEDS_OLD)
    assert not [name for name in metrics if name.startswith("mm/")]


def test_old_is_the_current_policy_where_it_was_not_scored(kit, tiny_folder, batch):
    """An unscored ratio is 1 and its gradient REINFORCE's: the same as scoring at the same weights."""
    policy = kit.make_policy(tiny_folder)
    scored, _ = policy.score(batch, NEEDS_OLD)
    a = policy.gradients(batch.minibatches[0], kit.SequenceRatio())
    b = policy.gradients(scored.minibatches[0], kit.SequenceRatio())
    assert same(a, b)


@pytest.mark.parametrize("routing", ["none", "R2"])
def test_resume_is_bit_exact(kit, tiny_folder, tmp_path, batch, routing):
    optim = {"lr": 5e-3, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01}
    straight = kit.make_policy(tiny_folder, routing=routing, optim=optim)
    expected = run(straight, kit, batch, 4)
    first = kit.make_policy(tiny_folder, routing=routing, optim=optim)
    assert run(first, kit, batch, 2) == expected[:2]
    first.save(tmp_path)
    drawn = torch.rand(3)
    second = kit.make_policy(tiny_folder, routing=routing, optim=optim, seed=99)
    second.load(tmp_path)
    assert second.version == 2
    assert torch.equal(torch.rand(3), drawn)
    assert run(second, kit, batch, 2) == expected[2:]
    assert same(weights(second), weights(straight))


def test_resume_restores_dropout_noise(kit, tiny_folder, tmp_path, batch):
    dropout = {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.1}}
    policy = kit.make_policy(tiny_folder, **dropout)
    assert torch.equal(
        policy.logprobs(batch.minibatches[0][0]), kit.make_policy(tiny_folder).logprobs(batch.minibatches[0][0])
    )
    run(policy, kit, batch, 1, kit.Nll())
    policy.save(tmp_path)
    expected = run(policy, kit, batch, 1, kit.Nll())
    other = kit.make_policy(tiny_folder, seed=5, **dropout)
    other.load(tmp_path)
    assert run(other, kit, batch, 1, kit.Nll()) == expected


def test_damaged_and_foreign_checkpoints_are_refused_and_change_nothing(kit, tiny_folder, tmp_path, batch):
    policy = kit.make_policy(tiny_folder)
    run(policy, kit, batch, 1)
    policy.save(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    fresh = kit.make_policy(tiny_folder)
    before = weights(fresh)
    tensors = next(tmp_path.glob("*.safetensors"))
    content = tensors.read_bytes()
    tensors.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is truncated or damaged .*use an earlier"):
        fresh.load(tmp_path)
    tensors.write_bytes(content)
    state_file = next(tmp_path.glob("*.json"))
    state = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**state, "format": 1}))
    with pytest.raises(
        CheckpointError, match=r"format is 1, this version reads 2 \(format 1 was bound to its layout\)"
    ):
        fresh.load(tmp_path)
    torn = {name: {**tensor, "parts": tensor["parts"][1:]} for name, tensor in state["tensors"].items()}
    state_file.write_text(json.dumps({**state, "tensors": torn}))
    with pytest.raises(CheckpointError, match=r"the files hold 0 of the \d+ elements of weights/embedding"):
        fresh.load(tmp_path)
    state_file.write_text("{")
    with pytest.raises(CheckpointError, match=r"rank_00000\.json is damaged"):
        fresh.load(tmp_path)
    state_file.write_text(json.dumps(state))
    other = kit.make_policy(kit.save_tiny_model(tmp_path / "other", num_experts=5))
    with pytest.raises(CheckpointError, match="belongs to another model"):
        other.load(tmp_path)
    state_file.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        fresh.load(tmp_path)
    assert same(before, weights(fresh))


def test_random_init_is_seeded_and_needs_no_weights(kit, tiny_folder, tmp_path):
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    a, b, c = (weights(kit.make_policy(tmp_path, model={"init": "random"}, seed=s)) for s in (1, 1, 2))
    assert same(a, b)
    assert not same(a, c)
    assert float(a["model.layers.0.mlp.gate.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert torch.equal(a["model.norm.weight"], torch.ones(40))


def test_unfilled_and_misshapen_weights_are_refused(kit, tiny_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_folder / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    name = next(n for n in tensors if "experts" in n)
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unfilled parameters"):
        kit.make_policy(tmp_path)
    broken = {**tensors, "lm_head.weight": tensors["lm_head.weight"].clone()}
    broken["lm_head.weight"][3, 2] = float("nan")
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not finite after loading: output_layer\.weight"):
        kit.make_policy(tmp_path)
    with pytest.raises((CheckpointError, DataError), match=r"config\.json does not exist"):
        kit.make_policy(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routing": "R4"}, "algorithm.routing is 'R4'"),
        ({"optim": {"name": "adamw"}}, "optim.name is 'adamw'; allowed: adam, sgd"),
        ({"optim": {"schedule": "step"}}, "optim.schedule is 'step'"),
        ({"optim": {"schedule": "linear", "warmup_steps": 20}}, "before the decay starts at step 20"),
        ({"recompute": "some"}, "precision.recompute is 'some'"),
        ({"model": {"init": "zeros"}}, "model.init is 'zeros'"),
    ],
)
def test_impossible_settings_name_the_field(kit, tiny_folder, change, message):
    with pytest.raises(ConfigError, match=message):
        kit.make_policy(tiny_folder, **change)


def test_fields_without_a_critic_are_refused(kit, tiny_folder, batch):
    class Critic:
        needs = frozenset({"values"})

        def __call__(self, x):
            raise AssertionError

    with pytest.raises(ConfigError, match="needs values, which the learner cannot fill"):
        kit.make_policy(tiny_folder).update(batch, Critic())


def test_aux_loss_reaches_the_routers_alone_scaled_by_its_coefficient(kit, tiny_folder, batch):
    class Nothing:
        needs = frozenset()

        def __call__(self, x):
            return 0.0 * x.logprobs.sum(), {}

    micro = batch.minibatches[0]
    plain = kit.make_policy(tiny_folder).gradients(micro, Nothing())
    assert all(g.abs().max() == 0 for g in plain.values())
    once = kit.make_policy(tiny_folder, model={"aux_loss_coefficient": 0.1}).gradients(micro, Nothing())
    twice = kit.make_policy(tiny_folder, model={"aux_loss_coefficient": 0.2}).gradients(micro, Nothing())
    gate = "model.layers.2.mlp.gate.weight"
    assert once[gate].abs().max() > 1e-5
    assert (2 * once[gate] - twice[gate]).abs().max() < 1e-6
    assert once["lm_head.weight"].abs().max() == 0


def test_bf16_trains_near_fp32(kit, tiny_folder, batch):
    from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection
    from moerl.mcore.policy import MegatronPolicy

    half = MegatronPolicy.build(
        model=ModelSection(path=str(tiny_folder)),
        parallel=ParallelSection(),
        precision=PrecisionSection(params="bf16"),
        optim=OptimSection(lr=1e-3),
        routing="none",
        router_shift=False,
        needs_reference=False,
        num_steps=4,
        seed=0,
    )
    full = kit.make_policy(tiny_folder)
    losses = [[m["loss"] for m in run(p, kit, batch, 3, kit.Nll())] for p in (half, full)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0][2] < losses[0][0]
