"""Composition of credit: advantages, shaping, token credit and the weights of a minibatch. Part of `build.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.advantage.history import HISTORY, PromptHistory
from moerl.algorithms.aggregation import sequence_weights, term_weights
from moerl.algorithms.compose_credit import credits_tokens
from moerl.algorithms.filtering import Filters
from moerl.algorithms.objective import Objective
from moerl.algorithms.registries import (
    advantage_posts,
    advantage_transforms,
    objectives,
    schedules,
    token_weights,
)
from moerl.algorithms.reward_shaping import build_shaping
from moerl.algorithms.token_weight.top_entropy import entropy_threshold
from moerl.algorithms.values import ValueCredit
from moerl.config.schema import AlgorithmSection
from moerl.credit import CreditRules, Members
from moerl.token_credit import TokenRules
from moerl.types import RolloutGroup


class MinibatchWeights:
    """The aggregations of a run over arrays; they cross into other rooms as plain functions."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm

    def policy(self, lengths: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
        """v_i [n] float64 of the policy term, and of every term without an own aggregation."""
        node = self._algorithm.aggregation
        return sequence_weights(node, torch.from_numpy(lengths), torch.from_numpy(group_ids)).numpy()

    def terms(self, lengths: np.ndarray, group_ids: np.ndarray, task_rewards: np.ndarray) -> dict[str, np.ndarray]:
        """v_i [n] float64 of the terms that have their own."""
        arrays = (torch.from_numpy(values) for values in (lengths, group_ids, task_rewards))
        return {term: weights.numpy() for term, weights in term_weights(self._algorithm, *arrays).items()}


def credit_state(algorithm: AlgorithmSection) -> dict[str, Any]:
    """The memory that the advantage rule keeps over steps, by name."""
    transform, _ = advantage_transforms.resolve(algorithm.advantage.transform, where="algorithm.advantage.transform")
    return {HISTORY: PromptHistory()} if transform.traits.get("keeps_history") else {}


def build_credit_rules(
    algorithm: AlgorithmSection, filters: Filters, reward_weights: dict[str, float], state: dict[str, Any]
) -> CreditRules:
    """Group credit of a run."""

    def members(group: RolloutGroup) -> Members:
        return Members(*filters.members(group))

    replacing, _ = objectives.resolve(algorithm.objective, where="algorithm.objective")
    return CreditRules(
        advantages=partial(group_advantages, algorithm.advantage),
        shaping=build_shaping(algorithm.shaping),
        keeps=filters.sample,
        counts=filters.counts,
        members=members,
        reward_weights=reward_weights,
        trains_on_zero=not replacing.traits.get("pairs", False),
        state=state,
    )


def build_token_rules(algorithm: AlgorithmSection, objective: Objective, rules: CreditRules) -> TokenRules:
    """Token credit of a run."""
    post, post_cfg = advantage_posts.resolve(algorithm.advantage.post, where="algorithm.advantage.post")
    weight, weight_cfg = token_weights.resolve(algorithm.token_weight, where="algorithm.token_weight")
    schedule, schedule_cfg = schedules.resolve(algorithm.schedule, where="algorithm.schedule")
    weights = MinibatchWeights(algorithm)
    has_teacher = algorithm.teacher.path is not None

    def threshold(entropies: Tensor) -> float:
        return entropy_threshold(entropies, weight_cfg.q)

    return TokenRules(
        objective=objective,
        kl=algorithm.kl,
        entropy=algorithm.entropy,
        is_per_token=credits_tokens(algorithm.advantage),
        removes=algorithm.correction.get("rejected") == "remove",
        teacher=algorithm.teacher.coefficient if has_teacher and algorithm.teacher.place == "reward" else 0.0,
        values=ValueCredit.of(algorithm.advantage, algorithm.critic) if algorithm.advantage.center == "value" else None,
        whiten=partial(post.target, cfg=post_cfg) if post.traits.get("acts_on") == "tokens" else None,
        threshold=threshold if weight.traits.get("entropy_quantile") else None,
        updates=schedule.traits["updates"],
        update_of=partial(schedule.target, cfg=schedule_cfg),
        advantages=rules.advantages,
        reward_weights=rules.reward_weights,
        state=rules.state,
        weigh=weights.policy,
        weigh_terms=weights.terms,
    )


def packs_pairs(algorithm: AlgorithmSection) -> bool:
    """The answers of a group must share a micro-batch."""
    replacing, _ = objectives.resolve(algorithm.objective, where="algorithm.objective")
    return bool(replacing.traits.get("pairs", False))


def counts_empty(algorithm: AlgorithmSection) -> bool:
    """Answers without a live token must reach the aggregation."""
    terms = algorithm.term_aggregation
    nodes = (algorithm.aggregation, terms.kl, terms.entropy, terms.value, terms.nll)
    return any(node.get("count_empty", False) for node in nodes)
