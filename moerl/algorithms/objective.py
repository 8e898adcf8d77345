"""The objective: policy term x correction + KL - entropy, as one plain sum over the tokens of a micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms import kl as kl_estimators
from moerl.algorithms.blocks import evaluate_in_blocks, is_worth_cutting
from moerl.algorithms.compose import composition_errors, value_errors
from moerl.algorithms.mismatch import TokenCorrection
from moerl.algorithms.ratio import LEVELS, LOG_RATIO_LIMIT, clamp_log_ratio
from moerl.algorithms.registries import corrections, objectives, token_weights, trust_regions
from moerl.algorithms.sanitise import CleanInputs, first_tokens, sanitise
from moerl.algorithms.segments import is_full, masked_seq_sum, per_sequence, seq_lengths, seq_totals, spread
from moerl.algorithms.types import (
    CORRECTION_MEAN,
    ENTROPY_COEFFICIENT,
    KL_COEFFICIENT,
    OPTIONAL_FIELDS,
    PER_SEQUENCE_FIELDS,
    LossInputs,
    TokenLoss,
)
from moerl.config.schema import AlgorithmSection, EntropySection, KLSection, RouterShiftSection
from moerl.errors import ConfigError
from moerl.metrics import Max, Mean, Metrics


@dataclass(frozen=True)
class PolicyTerm:
    """The policy axis of the objective, resolved."""

    anchor: str
    level: str
    is_elementwise: bool
    """The trust region reads the log-ratio and the advantage of a token alone, and is used in ratio form."""
    trust: Callable[[Tensor, LossInputs, Any], TokenLoss]
    trust_config: Any
    weight_inside: bool
    """The trust region takes a correction's weights inside its sequence ratio."""
    correct: Callable[[LossInputs, Any], TokenCorrection]
    correction_config: Any
    has_correction: bool
    is_normalized: bool
    """Divide correction weights by their minibatch mean."""
    router_shift: RouterShiftSection
    weigh: Callable[[LossInputs], Tensor] | None
    """Token weights [t], detached; None where every token counts alike."""
    replacement: Callable[[LossInputs], TokenLoss] | None
    """An objective that takes the place of all of the above."""


@dataclass(frozen=True)
class Objective:
    """One number per micro-batch, `sum(weight * token_loss)`; it adds up over micro-batches and ranks as it is."""

    policy: PolicyTerm
    kl: KLSection
    entropy: EntropySection
    nll_coefficient: float
    teacher_coefficient: float
    """Of the KL to a teacher in the loss; 0 is off."""
    needs: frozenset[str]
    """Optional fields of `LossInputs` that must be filled."""
    reads_rollout_logprobs: bool
    """Otherwise an engine logprob that is not finite is of no consequence."""
    constant_advantage: bool
    """The advantage must be the same on all tokens of a sequence."""
    needs_constants: frozenset[str]
    """Keys of `LossInputs.constants` that must be filled over the whole minibatch."""

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Loss (0-dim, float32 or wider, with gradient even where nothing is live) and metrics of one micro-batch."""
        per_token_only = self.policy.replacement is None and not self.needs & PER_SEQUENCE_FIELDS
        if per_token_only and is_worth_cutting(x):
            return evaluate_in_blocks(self._summed, x)
        return self._summed(x)

    def _summed(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        losses, metrics = self.token_losses(x)
        return losses.sum(), metrics

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """What every token adds to the loss, [t] with gradient, all terms together; and metrics."""
        clean = sanitise(x, reads_rollout_logprobs=self.reads_rollout_logprobs)
        metrics = dict(clean.metrics)
        losses, policy_metrics = self._policy_losses(clean)
        metrics.update(policy_metrics)
        if self.kl.place == "loss":
            value = self._kl(clean.inputs)
            # Off-policy corrections never touch the KL; only a token without a finite logprob drops out.
            coefficient = self.kl.coefficient if self.kl.target is None else x.constants[KL_COEFFICIENT]
            losses = losses + coefficient * clean.inputs.weights.kl * torch.where(clean.live, value, 0)
            metrics["kl/ref"] = _token_mean(value, clean.live)
        if _has_entropy_loss(self.entropy):
            coefficient = self.entropy.coefficient if self.entropy.target is None else x.constants[ENTROPY_COEFFICIENT]
            entropy = torch.where(clean.live, clean.inputs.entropy, 0)
            losses = losses - coefficient * clean.inputs.weights.entropy * entropy
        if self.teacher_coefficient:
            value = kl_estimators.kl_estimate("k3", clean.inputs.logprobs, clean.inputs.teacher_logprobs)
            losses = losses + self.teacher_coefficient * clean.inputs.weights.kl * torch.where(clean.live, value, 0)
            metrics["kl/teacher"] = _token_mean(value, clean.live)
        if self.nll_coefficient:
            surprise = torch.where(clean.live, -clean.inputs.logprobs, 0)
            losses = losses + self.nll_coefficient * clean.inputs.weights.nll * surprise
            metrics["pg/positive_nll"] = _token_mean(surprise, clean.live & (clean.inputs.weights.nll > 0))
        return losses, metrics

    def correct(self, x: LossInputs) -> tuple[TokenCorrection, Tensor]:
        """The correction at `x`, and which tokens [t] bool may be trained on at all: live, and all they need finite."""
        clean = sanitise(x, reads_rollout_logprobs=self.reads_rollout_logprobs)
        return self.policy.correct(clean.inputs, self.policy.correction_config), clean.inputs.mask

    def correction_mean(self, x: LossInputs) -> Mean:
        """This micro-batch's part of the constant `correction_mean`; merge over micro-batches and ranks."""
        corrected, usable = self.correct(x)
        return _token_mean(corrected.weight, usable & corrected.keep)

    def _policy_losses(self, clean: CleanInputs) -> tuple[Tensor, Metrics]:
        term, x = self.policy, clean.inputs
        if term.replacement is not None:
            token = term.replacement(x)
            seen: Metrics = {name: _token_mean(values, clean.live) for name, values in token.metrics.items()}
            return x.weights.policy * torch.where(x.mask, token.loss, 0), seen
        x, shift = self._split_router_shift(x)
        corrected = term.correct(x, term.correction_config)
        weight = corrected.weight
        is_plain = not term.has_correction and term.weigh is None
        if term.is_normalized:
            weight = weight / x.constants[CORRECTION_MEAN]
        if term.level == "none":
            anchor = x.logprobs.detach()
        else:
            anchor = x.old_logprobs if term.anchor == "old" else x.rollout_logprobs
        token_log_ratio = x.logprobs - anchor if shift is None else x.logprobs - anchor + shift
        level = LEVELS[term.level]
        if term.is_elementwise and is_plain and clean.is_full and level.is_mean is not None:
            return self._sequence_losses(clean, token_log_ratio, is_mean=level.is_mean)
        raw = level.log_ratio(token_log_ratio, x)
        if term.weight_inside:
            raw = raw + masked_seq_sum(weight.log(), x.mask, x.seq_ids, x.num_seqs)
            weight = torch.ones_like(weight)
        if term.weigh is not None:
            weight = weight * term.weigh(x).detach()
        log_ratio = clamp_log_ratio(raw)
        token = term.trust(log_ratio, x, term.trust_config)
        kept = x.mask & corrected.keep if term.has_correction else x.mask
        weighed = token.loss if is_plain else weight * token.loss
        is_whole = clean.is_full and (not term.has_correction or is_full(kept))
        losses = x.weights.policy * (weighed if is_whole else torch.where(kept, weighed, 0))
        metrics = _policy_metrics(clean, log_ratio=log_ratio, raw=raw, token=token)
        if term.has_correction:
            metrics.update(_correction_metrics(clean, corrected, is_whole=is_whole))
        return losses, metrics

    def _sequence_losses(self, clean: CleanInputs, token_log_ratio: Tensor, *, is_mean: bool) -> tuple[Tensor, Metrics]:
        """One ratio, one advantage, no token weights: a sequence is what a token is elsewhere."""
        term, x = self.policy, clean.inputs
        lengths = seq_lengths(x.seq_ids, x.num_seqs)
        raw = seq_totals(token_log_ratio, x.seq_ids, lengths)
        raw = raw / lengths.clamp(min=1) if is_mean else raw
        log_ratio = clamp_log_ratio(raw)
        token = term.trust(log_ratio, first_tokens(x, lengths), term.trust_config)
        losses = x.weights.policy * spread(token.loss, x.seq_ids, lengths)
        return losses, _sequence_metrics(x, log_ratio=log_ratio, raw=raw, token=token, lengths=lengths)

    def _split_router_shift(self, x: LossInputs) -> tuple[LossInputs, Tensor | None]:
        """Floor gamma; give log gamma for before the clip, or leave in `x.router_shift` what is applied after it."""
        shift = self.policy.router_shift
        others = {name: values for name, values in x.optional.items() if name != "router_shift"}
        if not shift.enabled:
            return dataclasses.replace(x, optional=others), None
        gamma = x.router_shift.clamp(min=shift.gamma_min, max=1.0)
        if shift.stage == "before_clip":
            return dataclasses.replace(x, optional=others), gamma.log()
        return dataclasses.replace(x, optional={**others, "router_shift": gamma}), None

    def _kl(self, x: LossInputs) -> Tensor:
        if self.kl.importance:
            return kl_estimators.importance_kl(self.kl.estimator, x.logprobs, x.ref_logprobs, x.old_logprobs)
        if self.kl.straight_through:
            return kl_estimators.straight_through_kl(self.kl.estimator, x.logprobs, x.ref_logprobs)
        return kl_estimators.kl_estimate(self.kl.estimator, x.logprobs, x.ref_logprobs)


def build_objective(cfg: AlgorithmSection) -> Objective:
    """The objective that the axes of `cfg` describe; a preset must already have been merged into them.

    Raises:
        ConfigError: axes that do not go together (all of them, one a line), or a plugin node that is wrong.
    """
    values = dataclasses.asdict(cfg)
    errors = [*value_errors(values), *composition_errors(values)]
    if errors:
        raise ConfigError("\n".join(errors))
    trust, trust_config = trust_regions.resolve(cfg.trust, where="algorithm.trust")
    correction, correction_config = corrections.resolve(cfg.correction, where="algorithm.correction")
    weight, weight_config = token_weights.resolve(cfg.token_weight, where="algorithm.token_weight")
    replacing, replacing_config = objectives.resolve(cfg.objective, where="algorithm.objective")
    form = trust.traits["form"]
    if form not in (cfg.form, "any"):
        raise ConfigError(
            f"algorithm.form is {cfg.form!r} but algorithm.trust {trust.name!r} has only the form {form!r}"
        )
    replaces = bool(replacing.traits["replaces"])
    is_normalized = bool(vars(correction_config).get("batch_normalize", False)) and not replaces
    term = PolicyTerm(
        anchor=cfg.anchor,
        level=cfg.level,
        is_elementwise=cfg.form == "ratio" and bool(trust.traits.get("elementwise")),
        trust=trust.traits["score"] if form == "any" and cfg.form == "score" else trust.target,
        trust_config=trust_config,
        weight_inside=bool(trust.traits.get("weight_inside")) and bool(correction.traits.get("weighs")),
        correct=correction.target,
        correction_config=correction_config,
        has_correction=correction.name != "none",
        is_normalized=is_normalized,
        router_shift=cfg.router_shift,
        weigh=None if weight.name == "one" else partial(weight.target, cfg=weight_config),
        replacement=partial(replacing.target, cfg=replacing_config) if replaces else None,
    )
    of_trust = trust.needs | set(trust.traits.get("needs_of", _nothing)(trust_config))
    axes = replacing.needs if replaces else of_trust | correction.needs | weight.needs | _ratio_needs(cfg)
    needs = axes | _regulariser_needs(cfg)
    constants = _constants(cfg, () if replaces else weight.traits.get("constants", ()), is_normalized=is_normalized)
    return Objective(
        policy=term,
        kl=cfg.kl,
        entropy=cfg.entropy,
        nll_coefficient=cfg.positive_nll.coefficient,
        teacher_coefficient=cfg.teacher.coefficient if _has_teacher_loss(cfg) else 0.0,
        needs=needs & OPTIONAL_FIELDS,
        reads_rollout_logprobs="rollout_logprobs" in needs,
        constant_advantage=LEVELS[cfg.level].constant_advantage and not replaces,
        needs_constants=constants,
    )


def _nothing(config: Any) -> tuple[str, ...]:
    return ()


def _constants(cfg: AlgorithmSection, of_weight: Sequence[str], *, is_normalized: bool) -> frozenset[str]:
    keys = set(of_weight)
    if is_normalized:
        keys.add(CORRECTION_MEAN)
    if cfg.kl.place == "loss" and cfg.kl.target is not None:
        keys.add(KL_COEFFICIENT)
    if _has_entropy_loss(cfg.entropy) and cfg.entropy.target is not None:
        keys.add(ENTROPY_COEFFICIENT)
    return frozenset(keys)


def _ratio_needs(cfg: AlgorithmSection) -> frozenset[str]:
    needs: set[str] = set()
    if cfg.level != "none":
        needs.add("old_logprobs" if cfg.anchor == "old" else "rollout_logprobs")
    if cfg.router_shift.enabled:
        needs.add("router_shift")
    return frozenset(needs)


def _regulariser_needs(cfg: AlgorithmSection) -> frozenset[str]:
    needs: set[str] = set()
    if cfg.kl.place == "loss":
        needs.add("ref_logprobs")
        if cfg.kl.importance:
            needs.add("old_logprobs")
    if _has_entropy_loss(cfg.entropy):
        needs.add("entropy")
    if _has_teacher_loss(cfg):
        needs.add("teacher_logprobs")
    return frozenset(needs)


def _has_teacher_loss(cfg: AlgorithmSection) -> bool:
    return cfg.teacher.path is not None and cfg.teacher.place == "kl" and cfg.teacher.coefficient > 0


def _has_entropy_loss(entropy: EntropySection) -> bool:
    return entropy.place == "loss" and bool(entropy.coefficient or entropy.target is not None)


def _policy_metrics(clean: CleanInputs, *, log_ratio: Tensor, raw: Tensor, token: TokenLoss) -> Metrics:
    x, live = clean.inputs, clean.live
    mean = _full_mean if clean.is_full else _token_mean
    ratio = log_ratio.detach().exp() if token.ratio is None else token.ratio
    seen = ratio if clean.is_full else torch.where(x.mask, ratio, -torch.inf)
    metrics: Metrics = {
        "pg/ratio_mean": mean(ratio, x.mask),
        "pg/ratio_max": Max(seen.amax() if len(ratio) else -torch.inf),
        # The same tensor came back from the clamp: nothing was beyond the limit.
        "pg/clamped": mean(raw.detach().abs() > LOG_RATIO_LIMIT, live) if raw is not log_ratio else _none_of(clean),
    }
    metrics.update({name: mean(values, live) for name, values in token.metrics.items()})
    if "old_logprobs" in x.optional:
        metrics["pg/kl_old"] = mean(x.old_logprobs - x.logprobs.detach(), live)
    if "entropy" in x.optional:
        metrics["pg/entropy"] = _token_mean(x.entropy, live)
    return metrics


def _sequence_metrics(x: LossInputs, *, log_ratio: Tensor, raw: Tensor, token: TokenLoss, lengths: Tensor) -> Metrics:
    """The policy's metrics as means over tokens, from one value for each sequence."""
    count, per_token = float(lengths.sum()), lengths.double()
    ratio = log_ratio.detach().exp()
    values = {"pg/ratio_mean": ratio, "pg/clamped": raw.detach().abs() > LOG_RATIO_LIMIT, **token.metrics}
    metrics: Metrics = {name: Mean((v.detach().double() * per_token).sum(), count) for name, v in values.items()}
    seen = torch.where(lengths > 0, ratio, -torch.inf)
    metrics["pg/ratio_max"] = Max(seen.amax() if len(seen) else -torch.inf)
    if "old_logprobs" in x.optional:
        metrics["pg/kl_old"] = _full_mean(x.old_logprobs - x.logprobs.detach(), x.mask)
    if "entropy" in x.optional:
        metrics["pg/entropy"] = _full_mean(x.entropy, x.mask)
    return metrics


def _correction_metrics(clean: CleanInputs, corrected: TokenCorrection, *, is_whole: bool) -> Metrics:
    x, live = clean.inputs, clean.live
    if is_whole:
        seqs = float((seq_lengths(x.seq_ids, x.num_seqs) > 0).sum())
        return {
            **{name: _full_mean(values, live) for name, values in corrected.metrics.items()},
            "mm/reject": _none_of(clean),
            "mm/reject_seq": Mean(0.0, seqs),
            "mm/weight_mean": _full_mean(corrected.weight, live),
        }
    dropped = live & ~(x.mask & corrected.keep)
    tokens = per_sequence(live.to(x.logprobs.dtype), live, x.seq_ids, x.num_seqs)
    lost = per_sequence(dropped.to(x.logprobs.dtype), live, x.seq_ids, x.num_seqs)
    metrics: Metrics = {name: _token_mean(values, live) for name, values in corrected.metrics.items()}
    metrics["mm/reject"] = _token_mean(dropped, live)
    metrics["mm/reject_seq"] = _token_mean((tokens > 0) & (lost == tokens), tokens > 0)
    metrics["mm/weight_mean"] = _token_mean(corrected.weight, x.mask & corrected.keep)
    return metrics


def _full_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean over all tokens, for which `mask` is known to be True."""
    values = values.detach()
    total = torch.count_nonzero(values) if values.dtype == torch.bool else values.sum()
    return Mean(total.double(), float(len(values)))


def _none_of(clean: CleanInputs) -> Mean:
    """A fraction of the live tokens that is 0."""
    return Mean(0.0, float(len(clean.live)) if clean.is_full else clean.live.sum().double())


def _token_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean over `mask` without leaving the device."""
    kept = torch.where(mask, values.detach().double(), 0.0)
    return Mean(kept.sum(), mask.sum().double())
