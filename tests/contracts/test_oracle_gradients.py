"""The learner's gradient of every preset equals autograd through the plain-torch oracle, at weights that have moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.objective import build_objective
from moerl.algorithms.presets import PRESETS
from moerl.config.load import config_from_dict
from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.data.batch import build_step_batch
from moerl.data.packing import plan_packing
from moerl.mcore.policy import MegatronPolicy
from moerl.reference.model import ReferenceModel
from moerl.replay import compare_gradients, oracle_gradients
from moerl.types import LocalArray, MicroBatch, Sample, TopLogprobs

POLICY = "configs/demo/policy"
LENGTHS = (9, 17, 6, 21, 12, 8, 30, 14)
TOLERANCE = 5e-5
"""Of a tensor's largest gradient entry; float32 sums in another order stay ten times below."""

FLOOR = 1e-6
"""Of the largest entry of all tensors: where a tensor's own gradient is a sum that nearly cancels."""


def build_policy(routing: str, *, router_shift: bool) -> MegatronPolicy:
    return MegatronPolicy.build(
        model=ModelSection(path=POLICY),
        parallel=ParallelSection(),
        precision=PrecisionSection(),
        optim=OptimSection(name="sgd", lr=0.02, clip_grad_norm=1.0),
        routing=routing,
        router_shift=router_shift,
        needs_reference=True,
        num_steps=10,
        seed=0,
    )


def algorithm(preset: str, routing: str):
    values = {**PRESETS[preset].values, "preset": preset, "routing": routing}
    if values.get("level") == "seq_geo":  # the papers' bounds clip every sequence of so large an update
        values["trust"] = {"name": "clip", "lo": 0.1, "hi": 0.1}
    if preset == "trm":  # as does its bound for an engine that disagrees at every token
        values["correction"] = {**values["correction"], "threshold": 2.0}
    return config_from_dict(
        {"run": {"name": "x", "num_steps": 1}, "model": {"path": POLICY}, "algorithm": values}
    ).algorithm


def samples(rng: np.random.Generator, *, constant_advantage: bool, pairs: bool) -> list[Sample]:
    made = []
    for i, length in enumerate(LENGTHS):
        mask = np.arange(length) >= 4
        advantage = rng.normal(size=1 if constant_advantage else length).astype(np.float32)
        if pairs:
            advantage = np.float32([1.0 if i % 2 else -1.0])
        made.append(
            Sample(
                sample_id=i,
                group_id=i // 2,
                prompt_id=f"p/{i // 2}",
                token_ids=rng.integers(2, 38, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, rng.normal(-3, 0.4, length), 0).astype(np.float32),
                advantages=np.where(mask, advantage, 0).astype(np.float32),
                reward=float(i % 3),
                temperature=1.0 if i % 2 else 0.8,
                routed_experts=LocalArray(
                    np.sort(rng.random((length, 2, 16)).argsort(-1)[..., :2], -1).astype(np.uint8)
                ),
                has_route=np.arange(length) < length - 1,
                top_logprobs=likeliest(np.random.default_rng(i), mask),
            )
        )
    return made


def likeliest(rng: np.random.Generator, mask: np.ndarray) -> TopLogprobs:
    """Five tokens of each step, together at 0.9."""
    ids = rng.random((len(mask), 38)).argsort(-1)[:, :5]
    logprobs = np.log(0.9 * rng.dirichlet(np.ones(5), len(mask)))
    live = mask[:, None]
    return TopLogprobs(np.where(live, ids, -1).astype(np.int32), np.where(live, logprobs, -np.inf).astype(np.float32))


def scored_batch(policy: MegatronPolicy, section, objective):
    pairs = section.objective["name"] == "group_dpo"
    made = samples(np.random.default_rng(0), constant_advantage=objective.constant_advantage, pairs=pairs)
    plan = plan_packing(
        LENGTHS,
        [s.group_id for s in made],
        [int(s.loss_mask.sum()) for s in made],
        dp_size=1,
        num_minibatches=2,
        num_epochs=1,
        max_tokens_per_microbatch=200 if pairs else 40,  # the two answers of a pair share a micro-batch
        seed=0,
    )

    def weigh(lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return sequence_weights(section.aggregation, torch.from_numpy(lengths), torch.from_numpy(groups)).numpy()

    batch = build_step_batch(made, plan, dp_rank=0, weigh=weigh, device="cpu", policy_version=0)
    batch = policy.score(batch, objective.needs | {"old_logprobs"})[0]
    noise = torch.Generator().manual_seed(0)
    return replace(batch, minibatches=tuple(tuple(off_policy(m, noise) for m in mini) for mini in batch.minibatches))


def off_policy(micro: MicroBatch, noise: torch.Generator) -> MicroBatch:
    """An engine that disagrees with the learner a little, so that corrections act and do not drop everything."""
    assert micro.old_logprobs is not None
    disagreement = 0.3 * torch.randn(micro.num_tokens, generator=noise)
    top = micro.old_top_logprobs
    if top is not None and micro.rollout_top_ids is not None:
        top = torch.where(micro.rollout_top_ids < 0, -torch.inf, top - disagreement[:, None])
    return replace(micro, rollout_logprobs=micro.old_logprobs + disagreement, rollout_top_logprobs=top)


def check(policy: MegatronPolicy, preset: str, routing: str) -> None:
    section = algorithm(preset, routing)
    objective = build_objective(section)
    batch = scored_batch(policy, section, objective)
    policy.update(batch, build_objective(algorithm("reinforce" if "reinforce" in PRESETS else "sft", "none")))
    reference = ReferenceModel.from_pretrained(POLICY)
    reference.load_weights(policy.export())
    everything = [micro for minibatch in batch.minibatches for micro in minibatch]
    gaps = compare_gradients(
        oracle_gradients(reference, everything, objective, routing=routing), policy.gradients(everything, objective)
    )
    overall = max(gap.largest for gap in gaps)
    assert overall > 0, "no gradient at all proves nothing"
    wrong = [gap for gap in gaps if gap.difference > TOLERANCE * gap.largest + FLOOR * overall]
    assert not wrong, wrong[:3]


@pytest.fixture(scope="module")
def fresh_policy(tmp_path_factory) -> Callable[[], MegatronPolicy]:
    """One policy for all presets, back at its first weights each time."""
    policy, start = build_policy("none", router_shift=True), tmp_path_factory.mktemp("start")
    policy.save(start)

    def renewed() -> MegatronPolicy:
        policy.load(start)
        return policy

    return renewed


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_has_the_oracles_gradient(fresh_policy: Callable[[], MegatronPolicy], preset: str) -> None:
    check(fresh_policy(), preset, "none")


@pytest.mark.parametrize("preset", ["grpo", "gspo", "rspo"])
@pytest.mark.parametrize("routing", ["R2", "R3"])
def test_replay_has_the_oracles_gradient(preset: str, routing: str) -> None:
    check(build_policy(routing, router_shift=True), preset, routing)
