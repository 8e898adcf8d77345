"""Reference and teacher: what they score with, when the reference moves, and that a checkpoint remembers it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.algorithms.objective import build_objective
from moerl.config.schema import AlgorithmSection, KLSection, ReferenceSection, TeacherSection
from moerl.errors import CheckpointError
from moerl.types import MicroBatch, StepBatch

NEEDS = frozenset({"ref_logprobs"})


@pytest.fixture(scope="module")
def batch(kit):
    return kit.make_step([kit.make_micro([5, 9], first_id=0, seed=1)], [kit.make_micro([7, 4, 6], first_id=2, seed=2)])


def objective(**sections):
    return build_objective(AlgorithmSection(kl=KLSection(place="loss", coefficient=0.01), **sections))


def updated(policy, batch: StepBatch, times: int, **sections) -> None:
    for _ in range(times):
        scored, _ = policy.score(batch, objective(**sections).needs)
        policy.update(scored, objective(**sections))


def first(batch: StepBatch) -> MicroBatch:
    return batch.minibatches[0][0]


def reference_logprobs(policy, batch: StepBatch) -> torch.Tensor:
    values = first(policy.score(batch, NEEDS)[0]).ref_logprobs
    assert values is not None
    return values


def test_the_reference_follows_every_so_many_updates(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder, needs_reference=True, reference=ReferenceSection(update_every_steps=2))
    at_start = reference_logprobs(policy, batch)
    updated(policy, batch, 1)
    assert torch.equal(reference_logprobs(policy, batch), at_start)
    updated(policy, batch, 1)
    assert not torch.equal(reference_logprobs(policy, batch), at_start)
    assert torch.equal(reference_logprobs(policy, batch), policy.logprobs(first(batch)))


def test_ema_keeps_a_share_of_the_old_reference(kit, tiny_folder, batch):
    policy = kit.make_policy(tiny_folder, needs_reference=True, reference=ReferenceSection(1, 0.75))
    before = {name: tensor.clone() for name, tensor in policy._frozen["ref_logprobs"].values.items()}
    updated(policy, batch, 1)
    live = policy._weights.local
    for name, tensor in policy._frozen["ref_logprobs"].values.items():
        torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * live[name].detach(), rtol=1e-6, atol=1e-7)


def test_ema_of_a_bf16_policy_moves_by_steps_that_bf16_would_round_away(kit, tiny_folder, batch, tmp_path):
    """Weights 1 % apart: (1 - ema) of that is below half a unit of bfloat16 in the last place."""
    ema, times = 0.9, 30
    settings = {"params": "bf16", "needs_reference": True, "reference": ReferenceSection(1, ema)}
    policy, other = kit.make_policy(tiny_folder, **settings), kit.make_policy(tiny_folder, **settings)
    frozen, live = policy._frozen["ref_logprobs"], policy._weights.local
    start = {name: tensor.float().clone() for name, tensor in live.items()}
    with torch.no_grad():
        for tensor in live.values():
            tensor.mul_(1.01)
    for _ in range(times):
        frozen.follow(ema)
    for name, tensor in live.items():
        wanted = ema**times * start[name] + (1 - ema**times) * tensor.float()
        torch.testing.assert_close(frozen.values[name], wanted, rtol=1e-5, atol=1e-8)
    with frozen.in_place():
        assert all(torch.equal(t, frozen.values[name].to(t.dtype)) for name, t in policy._weights.local.items())
    updated(policy, batch, 1)
    policy.save(tmp_path)
    other.load(tmp_path)
    assert all(torch.equal(frozen.values[n], t) for n, t in other._frozen["ref_logprobs"].values.items())


def test_a_checkpoint_remembers_where_the_reference_is(kit, tiny_folder, batch, tmp_path):
    settings = {"needs_reference": True, "reference": ReferenceSection(2)}
    policy, other = kit.make_policy(tiny_folder, **settings), kit.make_policy(tiny_folder, **settings)
    updated(policy, batch, 3)
    policy.save(tmp_path)
    other.load(tmp_path)
    assert torch.equal(reference_logprobs(other, batch), reference_logprobs(policy, batch))
    assert not torch.equal(reference_logprobs(other, batch), other.logprobs(first(batch)))
    updated(policy, batch, 1)
    updated(other, batch, 1)
    assert torch.equal(reference_logprobs(other, batch), reference_logprobs(policy, batch))
    fixed = kit.make_policy(tiny_folder, needs_reference=True)
    fixed.save(tmp_path)
    with pytest.raises(CheckpointError, match="reference"):
        policy.load(tmp_path)


@pytest.fixture
def teacher(tiny_folder: Path, tmp_path: Path) -> Path:
    """The same network with other weights."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "teacher"))
    (weights,) = folder.glob("*.safetensors")
    noise = torch.Generator().manual_seed(1)
    tensors = {name: t + 0.02 * torch.randn(t.shape, generator=noise) for name, t in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def test_the_teacher_scores_with_its_own_weights(kit, tiny_folder, batch, teacher):
    policy = kit.make_policy(tiny_folder, teacher=str(teacher))
    alone = kit.make_policy(teacher)
    plain = kit.make_policy(tiny_folder)
    scored = first(policy.score(batch, frozenset({"teacher_logprobs"}))[0])
    torch.testing.assert_close(scored.teacher_logprobs, alone.logprobs(first(batch)), rtol=0, atol=0)
    assert torch.equal(policy.logprobs(first(batch)), plain.logprobs(first(batch)))


def test_a_teacher_in_the_loss_pulls_the_policy_to_it(kit, tiny_folder, batch, teacher):
    section = TeacherSection(path=str(teacher), place="kl", coefficient=1.0)
    policy = kit.make_policy(tiny_folder, needs_reference=True, teacher=str(teacher))
    needs = objective(teacher=section).needs
    assert "teacher_logprobs" in needs
    quiet = replace(
        batch,
        minibatches=tuple(
            tuple(replace(m, advantages=torch.zeros_like(m.advantages)) for m in mini) for mini in batch.minibatches
        ),
    )

    def distance() -> float:
        micro = first(policy.score(quiet, needs)[0])
        assert micro.teacher_logprobs is not None
        gap = (policy.logprobs(micro) - micro.teacher_logprobs)[micro.mask]
        return float(gap.square().mean())

    before = distance()
    updated(policy, quiet, 6, teacher=section)
    assert distance() < 0.9 * before


def test_a_teacher_of_another_architecture_is_refused(kit, tiny_folder, teacher):
    config = teacher / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(CheckpointError, match=r"algorithm\.teacher\.path .* another architecture .*num_layers"):
        kit.make_policy(tiny_folder, teacher=str(teacher))
