"""Batch V of the vectors packed as a step, for tests of token credit."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from omegaconf import OmegaConf

from moerl.algorithms.filtering import Filters
from moerl.algorithms.objective import build_objective
from moerl.build_credit import MinibatchWeights, build_credit_rules, build_token_rules, credit_state
from moerl.config.schema import AlgorithmSection
from moerl.credit import credit_inputs
from moerl.data.batch import build_step_batch
from moerl.metrics import to_floats
from moerl.token_credit import TokenCredit
from moerl.types import PackPlan, Sample, StepBatch

LENGTHS = (4, 2, 3, 1)


def row(text):
    return torch.tensor([float(number) for number in text.replace("|", " ").split()], dtype=torch.float32)


OLD = row("-0.10 -2.30 -0.70 -1.20 | -0.50 -3.00 | -1.00 -0.05 -1.60 | -0.90")
ROLLOUT = row("-0.12 -3.20 -0.66 -1.21 | -0.47 -1.80 | -1.00 -0.06 -1.70 | -1.20")
REF = row("-0.10 -2.50 -0.60 -1.20 | -0.20 -2.90 | -1.00 -0.05 -1.70 | -0.70")
ENTROPY = row("0.1 0.9 0.2 0.3 | 0.8 0.7 | 0.05 0.4 1.5 | 0.6")
REWARDS = (1.0, 0.0, 0.5, 0.0)
RETURNS = row(".99 .99 1.01 1.00 | .04 .01 | .49 .49 .49 | .02")
WHITENED = row("1.077581 1.077581 1.126898 1.102240 | -1.264987 -1.338962 | -.155349 -.155349 -.155349 | -1.314304")
KL_REWARD = {"place": "reward", "estimator": "k1", "coefficient": 0.1}


def section(**values) -> AlgorithmSection:
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AlgorithmSection), values))
    assert isinstance(cfg, AlgorithmSection)
    return cfg


def parts(values):
    return values.split(list(LENGTHS))


class Step:
    """Batch V (one prompt token before each answer) as samples, cut by `micros`, and the rules of one section."""

    def __init__(self, cfg: AlgorithmSection, groups=(0, 0, 1, 1), rewards=REWARDS, rollout=ROLLOUT) -> None:
        self.cfg = cfg
        self.objective = build_objective(cfg)
        self.state = credit_state(cfg)
        self.rules = build_credit_rules(cfg, Filters(), {"r": 1.0}, self.state)
        self.rollout = parts(rollout)
        self.samples = [self._sample(i, groups[i], rewards[i]) for i in range(len(LENGTHS))]
        self._give_credit()

    def _sample(self, index, group, reward) -> Sample:
        length = LENGTHS[index] + 1
        mask = np.ones(length, dtype=bool)
        mask[0] = False
        return Sample(
            sample_id=index,
            group_id=group,
            prompt_id=f"p{group}",
            token_ids=np.arange(length, dtype=np.int32),
            loss_mask=mask,
            rollout_logprobs=np.concatenate([[0.0], self.rollout[index].numpy()]).astype(np.float32),
            advantages=np.zeros(length, dtype=np.float32),
            reward=reward,
            temperature=1.0,
            components=np.array([reward]),
            response_length=LENGTHS[index],
        )

    def _give_credit(self) -> None:
        inputs = credit_inputs(self.samples, {"r": 1.0}, self.state)
        values, _ = self.rules.advantages(inputs)
        self.samples = [
            dataclasses.replace(s, advantages=np.where(s.loss_mask, np.float32(a), np.float32(0)))
            for s, a in zip(self.samples, values.tolist(), strict=True)
        ]

    def batch(self, assignment, rank=0) -> StepBatch:
        weights = MinibatchWeights(self.cfg)
        made = build_step_batch(
            self.samples,
            PackPlan(assignment),
            dp_rank=rank,
            weigh=weights.policy,
            weigh_terms=weights.terms,
            device="cpu",
            policy_version=0,
        )

        def filled(micro):
            def spread(values):
                rows = [torch.cat([torch.zeros(1), parts(values)[i]]) for i in micro.sample_ids]
                return torch.cat([torch.zeros(0), *rows])

            return dataclasses.replace(
                micro, old_logprobs=spread(OLD), ref_logprobs=spread(REF), old_entropy=spread(ENTROPY)
            )

        return dataclasses.replace(made, minibatches=tuple(tuple(map(filled, mini)) for mini in made.minibatches))

    def token_credit(self, exchange=lambda value: [value]) -> TokenCredit:
        return TokenCredit(build_token_rules(self.cfg, self.objective, self.rules), exchange)

    def run(self, assignment=((((0, 1, 2, 3),),),), credit=None):
        batch, metrics = (credit or self.token_credit())(self.batch(assignment), self.samples, self.samples)
        return batch, to_floats(metrics)
