"""What an algorithm section asks for: fields, constants of the minibatch, terms beside the policy's."""

from __future__ import annotations

from collections.abc import Sequence

from moerl.algorithms.types import CORRECTION_MEAN, ENTROPY_COEFFICIENT, KL_COEFFICIENT
from moerl.config.schema import AlgorithmSection, EntropySection


def is_policy_alone(cfg: AlgorithmSection, replaces: bool) -> bool:
    """No other term of the loss reads the logprobs."""
    others = cfg.kl.place == "loss" or has_entropy_loss(cfg.entropy) or has_teacher_loss(cfg)
    return not (replaces or others or cfg.positive_nll.coefficient)


def constants_of(cfg: AlgorithmSection, of_weight: Sequence[str], *, is_normalized: bool) -> frozenset[str]:
    """Keys of `LossInputs.constants` that the terms read."""
    keys = set(of_weight)
    if is_normalized:
        keys.add(CORRECTION_MEAN)
    if cfg.kl.place == "loss" and cfg.kl.target is not None:
        keys.add(KL_COEFFICIENT)
    if has_entropy_loss(cfg.entropy) and cfg.entropy.target is not None:
        keys.add(ENTROPY_COEFFICIENT)
    return frozenset(keys)


def ratio_needs(cfg: AlgorithmSection) -> frozenset[str]:
    """Fields that the ratio reads."""
    needs: set[str] = set()
    if cfg.level != "none":
        needs.add("old_logprobs" if cfg.anchor == "old" else "rollout_logprobs")
    if cfg.router_shift.enabled:
        needs.add("router_shift")
    return frozenset(needs)


def regulariser_needs(cfg: AlgorithmSection) -> frozenset[str]:
    """Fields that the terms beside the policy's read."""
    needs: set[str] = set()
    if cfg.kl.place == "loss":
        needs.add("ref_logprobs")
        if cfg.kl.importance:
            needs.add("old_logprobs")
    if has_entropy_loss(cfg.entropy):
        needs.add("entropy")
    if has_teacher_loss(cfg):
        needs.add("teacher_logprobs")
    return frozenset(needs)


def has_teacher_loss(cfg: AlgorithmSection) -> bool:
    """The KL to a teacher is a term of the loss."""
    return cfg.teacher.path is not None and cfg.teacher.place == "kl" and cfg.teacher.coefficient > 0


def has_entropy_loss(entropy: EntropySection) -> bool:
    """The entropy is a term of the loss."""
    return entropy.place == "loss" and bool(entropy.coefficient or entropy.target is not None)
