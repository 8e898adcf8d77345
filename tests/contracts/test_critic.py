"""The critic's gradient equals autograd through the plain-torch backbone with a linear head; its state is exact."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moerl.config.schema import CriticSection, ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.data.batch import build_step_batch
from moerl.data.packing import plan_packing
from moerl.errors import CheckpointError, ConfigError, NumericsError
from moerl.mcore.critic import MegatronCritic
from moerl.metrics import to_floats
from moerl.reference.model import ReferenceModel
from moerl.replay import compare_gradients, oracle_value_gradients, oracle_values
from moerl.types import MicroBatch, Sample, StepBatch

POLICY = "configs/demo/policy"
LENGTHS = (9, 17, 6, 21, 12, 8, 30, 14)


def build(init: str = "policy", params: str = "fp32", **settings: float) -> MegatronCritic:
    return MegatronCritic.build(
        model=ModelSection(path=POLICY),
        parallel=ParallelSection(),
        precision=PrecisionSection(params=params),
        optim=OptimSection(),
        critic=CriticSection(init=init, **{"lr": 3e-3, **settings}),  # pyright: ignore[reportArgumentType] floats only
        num_steps=10,
        seed=0,
    )


def step_batch() -> StepBatch:
    rng = np.random.default_rng(0)
    masks = [np.arange(length) >= 4 for length in LENGTHS]
    samples = [
        Sample(
            sample_id=i,
            group_id=i // 2,
            prompt_id=f"p/{i // 2}",
            token_ids=rng.integers(2, 38, length).astype(np.int32),
            loss_mask=mask,
            rollout_logprobs=np.zeros(length, dtype=np.float32),
            advantages=np.zeros(length, dtype=np.float32),
            reward=float(i % 3),
            temperature=1.0,
        )
        for i, (length, mask) in enumerate(zip(LENGTHS, masks, strict=True))
    ]
    plan = plan_packing(
        LENGTHS,
        [s.group_id for s in samples],
        [int(mask.sum()) for mask in masks],
        dp_size=1,
        num_minibatches=2,
        num_epochs=1,
        max_tokens_per_microbatch=40,
        seed=0,
    )
    return build_step_batch(
        samples,
        plan,
        dp_rank=0,
        weigh=lambda lengths, groups: np.full(len(lengths), 1.0 / lengths.sum()),
        device="cpu",
        policy_version=0,
    )


def with_targets(batch: StepBatch) -> StepBatch:
    """Returns: the reward of the answer, on its live tokens."""

    def fill(micro: MicroBatch) -> MicroBatch:
        return replace(micro, returns=torch.where(micro.mask, micro.rewards[micro.seq_ids], 0.0))

    return replace(batch, minibatches=tuple(tuple(fill(micro) for micro in mini) for mini in batch.minibatches))


def trained(critic: MegatronCritic, steps: int) -> StepBatch:
    """The batch of the last of `steps` updates."""
    batch = step_batch()
    for _ in range(steps):
        batch = with_targets(critic.score(batch))
        critic.update(batch)
    return batch


@pytest.fixture(scope="module")
def critic() -> MegatronCritic:
    """One that has moved, so that the head passes gradient to the backbone."""
    made = build()
    trained(made, 2)
    return made


def oracle(critic: MegatronCritic) -> tuple[ReferenceModel, torch.Tensor, torch.Tensor]:
    weights = critic.export()
    weight, bias = weights.pop("value_head.weight"), weights.pop("value_head.bias")
    model = ReferenceModel.from_pretrained(POLICY)
    own = {name: weights.get(name, parameter.detach()) for name, parameter in model.hf_state().items()}
    model.load_weights(own.items())
    return model, weight.requires_grad_(), bias.requires_grad_()


def test_values_are_the_oracles(critic: MegatronCritic) -> None:
    micros = [micro for mini in step_batch().minibatches for micro in mini]
    model, weight, bias = oracle(critic)
    for micro, values in zip(micros, critic.values(micros), strict=True):
        assert bool((values[micro.position_ids == 0] == 0).all())
        wanted = oracle_values(model, weight, bias, micro).detach()
        assert float(wanted.abs().max()) > 0.01
        torch.testing.assert_close(values, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("clip", [0.2, 0.01])
def test_gradient_is_the_oracles(critic: MegatronCritic, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critic, "_clip", clip)
    noise = torch.Generator().manual_seed(0)
    scored = with_targets(critic.score(step_batch()))
    micros = [
        replace(micro, old_values=micro.old_values + 0.05 * torch.randn(micro.num_tokens, generator=noise))
        for mini in scored.minibatches
        for micro in mini
        if micro.old_values is not None
    ]
    model, weight, bias = oracle(critic)
    found = critic.gradients(micros)
    wanted = oracle_value_gradients(model, weight, bias, micros, clip=clip)
    gaps = compare_gradients({name: grad for name, grad in wanted.items() if name in found}, found)
    largest = max(gap.largest for gap in gaps)
    assert largest > 0
    assert not [gap for gap in gaps if gap.difference > 5e-5 * gap.largest + 1e-6 * largest]
    assert {"value_head.weight", "value_head.bias", "model.embed_tokens.weight"} <= found.keys()


def test_it_starts_at_zero_and_learns(tmp_path: Path) -> None:
    fresh = build()
    first = with_targets(fresh.score(step_batch()))
    assert all(bool((m.old_values == 0).all()) for mini in first.minibatches for m in mini if m.old_values is not None)
    before = to_floats(fresh.update(first))
    trained(fresh, 8)
    after = to_floats(fresh.update(with_targets(fresh.score(step_batch()))))
    assert before["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert after["critic/explained_variance"] > 0.5
    assert after["critic/loss"] < before["critic/loss"] / 2
    assert {"critic/grad_norm", "critic/clip_fraction", "critic/lr", "critic/value_mean"} <= after.keys()


def test_saved_and_loaded_is_bit_exact(tmp_path: Path) -> None:
    first, second = build(), build()
    trained(first, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.version == first.version == 2
    trained(first, 2)
    trained(second, 2)
    one, other = first.export(), second.export()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = build(init=str(tmp_path))
    fourth = build()
    fourth.load(tmp_path)
    assert third.version == 0
    assert all(torch.equal(tensor, fourth.export()[name]) for name, tensor in third.export().items())


def test_in_bf16_it_learns_and_its_checkpoint_is_bit_exact(tmp_path: Path) -> None:
    """Parameters are bf16 and their main copies float32: both come back, so that the next updates are the same."""
    first, second = build(params="bf16"), build(params="bf16")
    before = to_floats(first.update(with_targets(first.score(step_batch()))))
    trained(first, 6)
    first.save(tmp_path)
    second.load(tmp_path)
    assert all(tensor.dtype == torch.bfloat16 for tensor in second.export().values())
    trained(first, 2)
    trained(second, 2)
    one, other = first.export(), second.export()
    assert all(torch.equal(one[name], other[name]) for name in one)
    after = to_floats(second.update(with_targets(second.score(step_batch()))))
    assert after["critic/loss"] < before["critic/loss"] / 2


def test_it_starts_from_a_hugging_face_folder() -> None:
    one, other = build(init=POLICY).export(), build().export()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_cannot_be_a_critic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither 'policy', nor a Hugging Face folder"):
        build(init=str(tmp_path))
    text = Path(POLICY, "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(CheckpointError, match=r"another architecture.*num_layers"):
        build(init=str(tmp_path))


def test_targets_that_are_missing_or_not_finite_move_nothing(critic: MegatronCritic) -> None:
    before = critic.export()
    with pytest.raises(ConfigError, match="without returns"):
        critic.update(step_batch())
    batch = with_targets(critic.score(step_batch()))
    broken = replace(
        batch,
        minibatches=tuple(
            tuple(replace(m, returns=torch.full_like(m.advantages, math.nan)) for m in mini)
            for mini in batch.minibatches
        ),
    )
    with pytest.raises(NumericsError):
        critic.update(broken)
    assert all(torch.equal(tensor, critic.export()[name]) for name, tensor in before.items())
