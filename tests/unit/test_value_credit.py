"""Token credit with a critic and with a teacher: rewards, KL and values of single tokens in closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from moerl.algorithms.filtering import build_filters
from moerl.algorithms.objective import build_objective
from moerl.algorithms.presets import PRESETS
from moerl.build_credit import build_credit_rules, build_token_rules
from moerl.config.load import config_from_dict
from moerl.config.schema import AlgorithmSection
from moerl.data.batch import build_step_batch
from moerl.data.packing import plan_packing
from moerl.metrics import to_floats
from moerl.token_credit import TokenCredit
from moerl.types import MicroBatch, Sample, StepBatch

REWARDS = (1.0, 0.0)
PROMPT, ANSWER = 2, 4
VALUES = (0.2, 0.4, 0.5, 0.3)
GAE_OF_ONE = (0.714662, 0.541750, 0.465000, 0.700000)
"""Of VALUES with reward 1 at the end, lambda 0.95."""


def section(preset: str, **values) -> AlgorithmSection:
    algorithm = {**PRESETS[preset].values, "preset": preset, **values}
    base = {"run": {"name": "x", "num_steps": 1}, "model": {"path": "x"}}
    return config_from_dict({**base, "algorithm": algorithm}).algorithm


def samples() -> list[Sample]:
    """Two answers of four tokens; the credit rule gave each its reward."""
    mask = np.arange(PROMPT + ANSWER) >= PROMPT
    return [
        Sample(
            sample_id=i,
            group_id=i,
            prompt_id=f"p/{i}",
            token_ids=np.full(PROMPT + ANSWER, 3, dtype=np.int32),
            loss_mask=mask,
            rollout_logprobs=np.zeros(PROMPT + ANSWER, dtype=np.float32),
            advantages=np.where(mask, reward, 0.0).astype(np.float32),
            reward=reward,
            temperature=1.0,
            components=np.array([reward]),
            response_length=ANSWER,
        )
        for i, reward in enumerate(REWARDS)
    ]


def on_answers(values: tuple[float, ...]) -> torch.Tensor:
    """The same for both answers, garbage on the prompts."""
    return torch.tensor(([7.0] * PROMPT + list(values)) * len(REWARDS))


def scored(made: list[Sample], **fields: torch.Tensor) -> StepBatch:
    plan = plan_packing(
        [PROMPT + ANSWER] * 2,
        [0, 1],
        [ANSWER] * 2,
        dp_size=1,
        num_minibatches=1,
        num_epochs=1,
        max_tokens_per_microbatch=64,
        seed=0,
    )
    batch = build_step_batch(
        made,
        plan,
        dp_rank=0,
        weigh=lambda lengths, groups: np.full(len(lengths), 1.0 / lengths.sum()),
        device="cpu",
        policy_version=0,
    )
    ((micro,),) = batch.minibatches
    assert isinstance(micro, MicroBatch)
    return replace(batch, minibatches=((replace(micro, **fields),),))


def credited(algorithm: AlgorithmSection, **fields: torch.Tensor) -> tuple[dict[int, MicroBatch], dict[str, float]]:
    """Answer -> a view of its live tokens' advantages and returns; metrics."""
    rules = build_credit_rules(algorithm, build_filters([]), {"given": 1.0}, {})
    credit = TokenCredit(build_token_rules(algorithm, build_objective(algorithm), rules), lambda flat: [flat])
    made = samples()
    batch, metrics = credit(scored(made, **fields), made, made)
    ((micro,),) = batch.minibatches
    found = {}
    for place, sample in enumerate(micro.sample_ids):
        rows = (micro.seq_ids == place) & micro.mask
        returns = None if micro.returns is None else micro.returns[rows]
        found[sample] = replace(micro, advantages=micro.advantages[rows], returns=returns)
    return found, to_floats(metrics)


def close(found: torch.Tensor | None, wanted: list[float] | torch.Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found.double(), torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=2e-6)


def test_the_reward_is_paid_at_the_end_and_the_kl_at_its_token():
    plain = section("ppo", advantage={"center": "value", "scale": "none"})
    old, reference = on_answers((-1.0,) * 4), on_answers((-1.0, -3.0, -1.0, -1.0))
    fields = {"old_logprobs": old, "ref_logprobs": reference, "old_values": on_answers(VALUES)}
    free, _ = credited(replace(plain, kl=replace(plain.kl, coefficient=0.0)), **fields)
    close(free[0].advantages, list(GAE_OF_ONE))
    close(free[0].returns, torch.tensor(GAE_OF_ONE) + torch.tensor(VALUES))
    paid, metrics = credited(replace(plain, kl=replace(plain.kl, coefficient=0.1)), **fields)
    # k1 = 2 at the second token: -0.2 there, and lambda times that before it.
    close(paid[0].advantages - free[0].advantages, [-0.2 * 0.95, -0.2, 0.0, 0.0])
    close(paid[0].returns, torch.tensor(GAE_OF_ONE) + torch.tensor(VALUES) - torch.tensor([0.19, 0.2, 0.0, 0.0]))
    assert abs(metrics["kl/reward"] - 0.5) < 1e-6


def test_whitening_is_over_the_tokens_of_the_step_and_leaves_the_returns():
    algorithm = section("vapo")
    found, _ = credited(algorithm, old_values=on_answers(VALUES))
    everything = torch.cat([found[0].advantages, found[1].advantages]).double()
    assert abs(float(everything.mean())) < 1e-6
    assert abs(float(everything.std(unbiased=False)) - 1.0) < 1e-5
    close(found[0].returns, [1.0] * 4)
    close(found[1].returns, [0.0] * 4)


def test_a_teacher_rewards_each_token_by_itself():
    algorithm = section("reinforce", level="token", trust={"name": "none"}, teacher={"path": "t", "coefficient": 0.5})
    old, teacher = on_answers((-1.0,) * 4), on_answers((-1.0, -2.0, -0.5, -1.0))
    found, metrics = credited(algorithm, old_logprobs=old, teacher_logprobs=teacher)
    close(found[0].advantages, [1.0, 0.5, 1.25, 1.0])
    close(found[1].advantages, [0.0, -0.5, 0.25, 0.0])
    assert abs(metrics["kl/teacher"] - 0.125) < 1e-6
