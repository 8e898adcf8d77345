"""Routers that are float32 in their files stay so in a bfloat16 learner: in training, checkpoints and exports."""

from __future__ import annotations

import pytest
import torch
from mixed_types import is_router, save_mixed
from safetensors.torch import load_file
from tiny_models import KINDS, save_model

from moerl.checkpoint import CheckpointStore
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options
from moerl.convert.places import find
from moerl.mcore.model import unwrap
from moerl.mcore.router_replay import ReplayRouter

MIXED = ("wide_sigmoid", "softmax", "fused")
"""MiniMax-M2, Qwen3-MoE, and gpt-oss, whose routers have biases."""


@pytest.fixture(scope="module", params=MIXED)
def mixed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save_mixed(folder, request.param)


def exported(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


def routers_of(policy) -> list[ReplayRouter]:
    return [m for c in policy._runner._chunks for m in unwrap(c).modules() if isinstance(m, ReplayRouter)]


def assert_same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def on_disk(folder, policy, tmp_path) -> dict[str, torch.Tensor]:
    """What a Hugging Face folder of the exported weights holds."""
    from moerl.models.hf_export import write_hf_folder

    names = frozenset(name for name in exported(policy) if is_router(name))
    write_hf_folder(tmp_path / "hf", policy.export(), folder, dtype=torch.bfloat16, kept_names=names)
    return load_file(tmp_path / "hf" / "model.safetensors")


def test_what_was_not_trained_comes_out_as_it_was_stored(kit, mixed, tmp_path):
    _, folder, stored = mixed
    policy = kit.make_policy(folder, params="bf16")
    assert_same(on_disk(folder, policy, tmp_path), stored)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_step_moves_them_in_float32_and_a_checkpoint_has_them(kit, mixed, tmp_path, distributed):
    kind, folder, stored = mixed
    optim = {"distributed": distributed, "lr": 1e-4}
    batch = kit.make_step([kit.make_micro([5, 11, 9], vocab=54)])
    policy = kit.make_policy(folder, params="bf16", optim=optim)
    before = exported(policy)
    policy.update(batch, kit.Nll())
    after = exported(policy)
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype, name
        if not is_router(name):
            assert tensor.dtype == torch.bfloat16
        elif "correction_bias" not in name:
            moved = (tensor - before[name]).abs()
            assert 0 < float(moved.max()) < 1.1e-4, name  # Adam's first step is the learning rate
            assert not torch.equal(tensor, tensor.bfloat16().float())
    CheckpointStore(tmp_path / "run" / "checkpoints", keep=1, model_id="m").save(1, policy, {})
    (tmp_path / "run" / "config.yaml").write_text(f"model:\n  path: {folder}\n")
    again = kit.make_policy(folder, params="bf16", optim={**optim, "distributed": not distributed})
    again.load(tmp_path / "run" / "checkpoints" / "step_000001" / "learner")
    assert_same(exported(again), after)
    more = kit.make_step([kit.make_micro([8, 3, 12], seed=1, vocab=54)])
    policy.update(more, kit.Nll())
    again.update(more, kit.Nll())
    found = exported(again)
    for name, tensor in exported(policy).items():  # the two optimizers cut their loops elsewhere, and round by that
        step = 2**-7 if tensor.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found[name], tensor, rtol=step, atol=1e-8, msg=name)
    export_checkpoint(find(tmp_path / "run"), tmp_path / "hf", Options(dtype=torch.bfloat16))
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: t.dtype for name, t in written.items()} == {name: t.dtype for name, t in stored.items()}
    assert all(torch.equal(written[name], after[name]) for name in written if is_router(name))
    assert kind in MIXED


def test_the_choice_is_made_with_the_unrounded_router(kit, tmp_path):
    """Experts that differ below bfloat16's last bit: rounded, all of them would be one."""
    from safetensors.torch import save_file

    stored = save_mixed(tmp_path, "softmax")
    kind = KINDS["softmax"]
    generator = torch.Generator().manual_seed(0)
    for name, tensor in stored.items():
        if is_router(name):
            fine = torch.randn(tensor.shape, generator=generator) * 2**-12
            stored[name] = torch.full_like(tensor, 1.0) + fine.clamp(-(2**-9), 2**-9)
            assert torch.equal(stored[name].bfloat16(), torch.ones_like(tensor, dtype=torch.bfloat16))
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    policy = kit.make_policy(tmp_path, params="bf16")
    seen: dict[int, torch.Tensor] = {}

    def keep(router, arguments, _out) -> None:
        seen[router.layer_number] = arguments[0].detach().flatten(0, -2)

    hooks = [router.register_forward_hook(keep) for router in routers_of(policy)]
    micro = kit.make_micro([6, 14], vocab=54)
    own = policy.observe([micro])[0].own_routes
    for hook in hooks:
        hook.remove()
    live = torch.nonzero(micro.mask & (micro.position_ids > 0))[:, 0] - 1
    for layer in range(kind.layers):
        hidden = seen[layer + 1]
        assert hidden.dtype == torch.bfloat16
        logits = hidden.double() @ stored[f"model.layers.{layer}.mlp.gate.weight"].double().t()
        wanted = logits.topk(kind.topk).indices[live].sort(-1).values
        assert (own[:, layer].sort(-1).values == wanted).float().mean() > 0.99


def test_a_folder_in_one_type_keeps_it(kit, tmp_path):
    narrow = save_mixed(tmp_path / "bf16", "softmax", routers=torch.bfloat16)
    assert_same(exported(kit.make_policy(tmp_path / "bf16", params="bf16")), narrow)
    save_model(tmp_path / "fp32", "softmax")
    wide = load_file(tmp_path / "fp32" / "model.safetensors")
    assert_same(exported(kit.make_policy(tmp_path / "fp32")), wide)
    found = exported(kit.make_policy(tmp_path / "fp32", params="bf16"))
    assert_same(found, {name: t if is_router(name) else t.bfloat16() for name, t in wide.items()})


def test_random_weights_have_the_type_that_was_asked_for(kit, tmp_path):
    save_mixed(tmp_path, "softmax")
    policy = kit.make_policy(tmp_path, params="bf16", model={"init": "random"})
    assert {tensor.dtype for tensor in exported(policy).values()} == {torch.bfloat16}


def test_a_teacher_whose_routers_the_policy_cannot_hold_is_told_of(kit, tmp_path, caplog):
    save_mixed(tmp_path / "policy", "softmax", routers=torch.bfloat16)
    save_mixed(tmp_path / "teacher", "softmax", seed=4)
    kit.make_policy(tmp_path / "policy", params="bf16", teacher=str(tmp_path / "teacher"))
    (said,) = [record.getMessage() for record in caplog.records if "routers are rounded" in record.getMessage()]
    assert str(tmp_path / "teacher") in said
    assert "model.layers.0.mlp.gate.weight" in said
    caplog.clear()
    kit.make_policy(tmp_path / "teacher", params="bf16", teacher=str(tmp_path / "policy"))
    assert "rounded" not in caplog.text
