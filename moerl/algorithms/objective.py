"""The objective: policy term x correction + KL - entropy, as one plain sum over the tokens of a micro-batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms import kl as kl_estimators
from moerl.algorithms.blocks import Slopes, evaluate_in_blocks, is_worth_cutting
from moerl.algorithms.compose import composition_errors, value_errors
from moerl.algorithms.elementwise import suits_numpy, total
from moerl.algorithms.mismatch import TokenCorrection
from moerl.algorithms.needs import (
    constants_of,
    has_entropy_loss,
    has_teacher_loss,
    is_policy_alone,
    ratio_needs,
    regulariser_needs,
)
from moerl.algorithms.policy_metrics import correction_metrics, policy_metrics, sequence_metrics, token_mean
from moerl.algorithms.ratio import LEVELS, LOG_RATIO_LIMIT, clamp_log_ratio
from moerl.algorithms.registries import corrections, objectives, token_weights, trust_regions
from moerl.algorithms.sanitise import CleanInputs, first_tokens, sanitise
from moerl.algorithms.segments import (
    answers_at_once,
    is_full,
    masked_seq_sum,
    seq_lengths,
    seq_totals,
    spread,
)
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
from moerl.metrics import Metrics, Sum


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
    is_score: bool
    """The gradient goes through the logprob of a token alone, not through the ratio."""


@dataclass(frozen=True)
class _Scored:
    """The policy term of a micro-batch before it is weighed, of every token [t] or once a sequence [n]."""

    token: TokenLoss
    metrics: Metrics
    beyond: Tensor | None
    """bool: the log-ratio was clamped, and has no gradient; None where none was."""
    weight: Tensor | None = None
    """Of corrections and token weights; None is 1."""
    kept: Tensor | None = None
    """bool: what takes part; None is everything."""

    def where_kept(self, values: Tensor) -> Tensor:
        """0 elsewhere."""
        return values if self.kept is None else torch.where(self.kept, values, 0)


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
    has_slopes: bool
    """There is the policy term alone, and its trust region gives its slope."""

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Loss (0-dim, float32 or wider, with gradient even where nothing is live) and metrics of one micro-batch."""
        per_token_only = self.policy.replacement is None and not self.needs & PER_SEQUENCE_FIELDS
        if per_token_only and is_worth_cutting(x):
            slopes = self._slopes_of(x)
            return evaluate_in_blocks(self._summed, x, slopes, at_once=slopes == self.sequence_slopes)
        return self._summed(x)

    def _slopes_of(self, x: LossInputs) -> Slopes | None:
        """The processor's way to the gradient; a device keeps to the one that asks no questions."""
        if not self.has_slopes or not answers_at_once(x.mask):
            return None
        if self.policy.is_score or LEVELS[self.policy.level].is_mean is None:
            return self.slopes
        is_of_old = self.policy.anchor == "old" and not self.policy.router_shift.enabled
        can = self._is_once_a_sequence() and is_of_old and is_full(x.mask) and suits_numpy(x.logprobs)
        return self.sequence_slopes if can else None

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
            metrics["kl/ref"] = token_mean(value, clean.live)
        if has_entropy_loss(self.entropy):
            coefficient = self.entropy.coefficient if self.entropy.target is None else x.constants[ENTROPY_COEFFICIENT]
            entropy = torch.where(clean.live, clean.inputs.entropy, 0)
            losses = losses - coefficient * clean.inputs.weights.entropy * entropy
        if self.teacher_coefficient:
            value = kl_estimators.kl_estimate("k3", clean.inputs.logprobs, clean.inputs.teacher_logprobs)
            losses = losses + self.teacher_coefficient * clean.inputs.weights.kl * torch.where(clean.live, value, 0)
            metrics["kl/teacher"] = token_mean(value, clean.live)
        if self.nll_coefficient:
            surprise = torch.where(clean.live, -clean.inputs.logprobs, 0)
            losses = losses + self.nll_coefficient * clean.inputs.weights.nll * surprise
            metrics["pg/positive_nll"] = token_mean(surprise, clean.live & (clean.inputs.weights.nll > 0))
        return losses, metrics

    def correct(self, x: LossInputs) -> tuple[TokenCorrection, Tensor]:
        """The correction at `x`, and which tokens [t] bool may be trained on at all: live, and all they need finite."""
        clean = sanitise(x, reads_rollout_logprobs=self.reads_rollout_logprobs)
        return self.policy.correct(clean.inputs, self.policy.correction_config), clean.inputs.mask

    def _policy_losses(self, clean: CleanInputs) -> tuple[Tensor, Metrics]:
        term, x = self.policy, clean.inputs
        if term.replacement is not None:
            token = term.replacement(x)
            seen: Metrics = {name: token_mean(values, clean.live) for name, values in token.metrics.items()}
            return x.weights.policy * torch.where(x.mask, token.loss, 0), seen
        if clean.is_full and self._is_once_a_sequence():
            lengths = seq_lengths(x.seq_ids, x.num_seqs)
            scored = self._score_sequences(clean, lengths, seq_totals(self._log_ratio(clean)[1], x.seq_ids, lengths))
            per_token = spread(scored.token.loss, x.seq_ids, lengths)
            return x.weights.policy * per_token, scored.metrics
        scored = self._score_tokens(clean)
        weighed = scored.token.loss if scored.weight is None else scored.weight * scored.token.loss
        return x.weights.policy * scored.where_kept(weighed), scored.metrics

    def slopes(self, x: LossInputs, out: Tensor | None) -> tuple[Tensor, Tensor, Metrics]:
        """Loss, gradient by the logprobs [t] (in `out`, where that is given) and metrics, without a backward pass.

        For objectives with `has_slopes` and a ratio for every token, called without gradient.
        """
        clean = sanitise(x, reads_rollout_logprobs=self.reads_rollout_logprobs)
        scored, own = self._score_tokens(clean), clean.inputs
        token = scored.token
        weights = own.weights.policy if scored.weight is None else own.weights.policy * scored.weight
        weights = scored.where_kept(weights)
        loss = (weights * token.loss).sum()
        if token.is_shared:
            weights = masked_seq_sum(weights, own.mask, own.seq_ids, own.num_seqs)
            weights = weights if clean.is_full else torch.where(own.mask, weights, 0)
        gradient = torch.mul(weights, _slope(token), out=out)
        if not self.policy.is_score and scored.beyond is not None:
            gradient.masked_fill_(scored.beyond, 0)
        return loss, gradient, {**clean.metrics, **scored.metrics}

    def sequence_slopes(self, x: LossInputs, out: Tensor | None) -> tuple[Tensor, Tensor, Metrics] | None:
        """The same for one ratio to the old policy a sequence, everything live; None where a logprob is not finite.

        But for the log-ratios and the gradient, nothing is as long as the batch.
        """
        lengths = seq_lengths(x.seq_ids, x.num_seqs)
        totals = seq_totals(x.logprobs.detach() - x.old_logprobs.detach(), x.seq_ids, lengths)
        drift = total(totals)
        if not math.isfinite(drift):
            return None
        clean = CleanInputs(x, x.mask, {"pg/invalid_logprobs": Sum(0)}, is_full=True, total_drift=drift)
        scored = self._score_sequences(clean, lengths, totals)
        weights = seq_totals(x.weights.policy, x.seq_ids, lengths)
        gradient = weights * _slope(scored.token)
        if LEVELS[self.policy.level].is_mean:
            gradient = gradient / lengths.clamp(min=1)
        if scored.beyond is not None:
            gradient.masked_fill_(scored.beyond, 0)
        loss = (weights * scored.token.loss).sum()
        return loss, spread(gradient, x.seq_ids, lengths), {**clean.metrics, **scored.metrics}

    def _score_tokens(self, clean: CleanInputs) -> _Scored:
        term = self.policy
        x, token_log_ratio = self._log_ratio(clean)
        raw = LEVELS[term.level].log_ratio(token_log_ratio, x)
        corrected = term.correct(x, term.correction_config) if term.has_correction else None
        weight = None if corrected is None else corrected.weight
        if weight is not None and term.is_normalized:
            weight = weight / x.constants[CORRECTION_MEAN]
        if weight is not None and term.weight_inside:
            raw = raw + masked_seq_sum(weight.log(), x.mask, x.seq_ids, x.num_seqs)
            weight = None
        if term.weigh is not None:
            own = term.weigh(x).detach()
            weight = own if weight is None else weight * own
        log_ratio = clamp_log_ratio(raw)
        token = term.trust(log_ratio, x, term.trust_config)
        kept = x.mask if corrected is None else x.mask & corrected.keep
        is_whole = clean.is_full and (corrected is None or is_full(kept))
        metrics = policy_metrics(clean, log_ratio=log_ratio, raw=raw, token=token)
        if corrected is not None:
            metrics.update(correction_metrics(clean, corrected, is_whole=is_whole))
        return _Scored(token, metrics, _beyond(raw, log_ratio), weight, None if is_whole else kept)

    def _is_once_a_sequence(self) -> bool:
        """One ratio, one advantage, no token weights: where all is live a sequence is what a token is elsewhere."""
        term = self.policy
        is_plain = term.is_elementwise and not term.has_correction and term.weigh is None
        return is_plain and LEVELS[term.level].is_mean is not None

    def _score_sequences(self, clean: CleanInputs, lengths: Tensor, totals: Tensor) -> _Scored:
        """From the sums of the log-ratios [n]."""
        term = self.policy
        raw = totals / lengths.clamp(min=1) if LEVELS[term.level].is_mean else totals
        log_ratio = clamp_log_ratio(raw)
        token = term.trust(log_ratio, first_tokens(clean.inputs, lengths, raw.dtype), term.trust_config)
        metrics = sequence_metrics(clean, log_ratio=log_ratio, raw=raw, token=token, lengths=lengths)
        return _Scored(token, metrics, _beyond(raw, log_ratio))

    def _log_ratio(self, clean: CleanInputs) -> tuple[LossInputs, Tensor]:
        """The inputs as the trust region may see them, and token log-ratios [t]."""
        x, shift = self._split_router_shift(clean.inputs)
        is_old = self.policy.anchor == "old"
        if self.policy.level == "none":
            log_ratio = x.logprobs - x.logprobs.detach()
        elif is_old and clean.drift is not None:
            log_ratio = clean.drift
        else:
            log_ratio = x.logprobs - (x.old_logprobs if is_old else x.rollout_logprobs)
        return x, log_ratio if shift is None else log_ratio + shift

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
        is_score=cfg.form == "score",
    )
    of_trust = trust.needs | set(trust.traits.get("needs_of", _nothing)(trust_config))
    axes = replacing.needs if replaces else of_trust | correction.needs | weight.needs | ratio_needs(cfg)
    needs = axes | regulariser_needs(cfg)
    constants = constants_of(cfg, () if replaces else weight.traits.get("constants", ()), is_normalized=is_normalized)
    return Objective(
        policy=term,
        kl=cfg.kl,
        entropy=cfg.entropy,
        nll_coefficient=cfg.positive_nll.coefficient,
        teacher_coefficient=cfg.teacher.coefficient if has_teacher_loss(cfg) else 0.0,
        needs=needs & OPTIONAL_FIELDS,
        reads_rollout_logprobs="rollout_logprobs" in needs,
        constant_advantage=LEVELS[cfg.level].constant_advantage and not replaces,
        needs_constants=constants,
        has_slopes=is_policy_alone(cfg, replaces) and trust.traits.get("has_slope", _never)(trust_config),
    )


def _nothing(config: Any) -> tuple[str, ...]:
    return ()


def _never(config: Any) -> bool:
    return False


def _slope(token: TokenLoss) -> Tensor:
    if token.slope is None:
        raise TypeError("a trust region that is registered with has_slope returned a TokenLoss without slope")
    return token.slope


def _beyond(raw: Tensor, log_ratio: Tensor) -> Tensor | None:
    """Where the clamp took the gradient away; the same tensor comes back where it did nothing."""
    return None if raw is log_ratio else raw.detach().abs() > LOG_RATIO_LIMIT
