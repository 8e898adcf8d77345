"""Which values of the axes go together; plain values in, messages out, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from moerl.algorithms.axes import Axes
from moerl.algorithms.compose_credit import CONSTANT_ADVANTAGE_LEVELS, CREDIT_RULES, TOKEN_ADVANTAGE_POSTS
from moerl.algorithms.compose_models import MODEL_RULES, model_values
from moerl.algorithms.unread import unread_settings
from moerl.config.choices import choice_fault

TRUST_FORMS: Mapping[str, str] = {
    "none": "any",
    "clip": "ratio",
    "log_clip": "ratio",
    "soft_gate": "ratio",
    "dyn_clip": "ratio",
    "position_clip": "ratio",
    "is_clip": "score",
    "gamma_kernel": "score",
    "div_mask": "score",
    "ratio_mask": "score",
}
"""The forms that each built-in trust region has; the registry's traits say the same (tested)."""

TRUST_LEVELS: Mapping[str, tuple[str, ...]] = {
    "log_clip": ("geo_clip",),
    "gamma_kernel": ("seq_prod",),
    "dyn_clip": ("token",),
    "position_clip": ("prefix_prod",),
    "div_mask": ("token",),
    "ratio_mask": ("token",),
}
"""Trust regions that are defined at some levels only."""

MISMATCH_WEIGHTS = frozenset({"tis", "mis", "icepop", "seq_mask_tis"})
"""Corrections that multiply by train / rollout ratios."""

SAME_AGGREGATION = "same"
"""Name of a term's aggregation that is the policy term's."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "advantage.center": ("none", "group_mean", "group_loo", "batch_mean", "history", "value"),
    "advantage.scale": ("none", "group_std", "batch_std_raw", "batch_std_centered"),
    "advantage.singleton": ("zero", "raw"),
    "anchor": ("old", "rollout"),
    "level": ("none", "token", "seq_geo", "seq_geo_token", "seq_prod", "geo_clip", "prefix_prod", "prefix_min"),
    "form": ("ratio", "score"),
    "routing": ("none", "R2", "R3", "frozen_router", "frozen_router_bias"),
    "router_shift.stage": ("before_clip", "after_clip"),
    "kl.place": ("none", "loss", "reward"),
    "kl.estimator": ("k1", "k2", "k3"),
    "entropy.place": ("none", "loss", "reward"),
    "teacher.place": ("reward", "kl"),
}


def composition_errors(values: Mapping[str, Any]) -> list[str]:
    """Axes of an algorithm section that do not go together, one message per fault; [] if none.

    Args:
        values: the section as nested plain values; what is left out has the schema's default.
    """
    axes = Axes(values)
    rules = (
        _forms,
        _levels,
        _anchors,
        _corrections,
        _router_shift,
        _kl,
        *CREDIT_RULES,
        *MODEL_RULES,
    )
    return [message for rule in rules for message in rule(axes)]


def value_errors(values: Mapping[str, Any]) -> list[str]:
    """Single values that do not exist, with the nearest word, or are out of bounds."""
    axes = Axes(values)
    faults = (choice_fault(f"algorithm.{path}", axes[path], allowed) for path, allowed in CHOICES.items())
    found = [fault for fault in faults if fault is not None]
    if axes["advantage.std_ddof"] not in (0, 1):
        found.append(f"algorithm.advantage.std_ddof is {axes['advantage.std_ddof']!r}, but must be 0 or 1")
    if not 0 < axes["router_shift.gamma_min"] <= 1:
        found.append(f"algorithm.router_shift.gamma_min is {axes['router_shift.gamma_min']!r}, but must be in (0, 1]")
    for path in ("kl.target", "entropy.target"):
        if axes[path] is not None and not 0 < axes[path] < math.inf:
            found.append(f"algorithm.{path} is {axes[path]!r}, but must be a finite number above 0, or null")
    if not math.isfinite(axes["positive_nll.threshold"]):
        found.append(f"algorithm.positive_nll.threshold is {axes['positive_nll.threshold']!r}, but must be finite")
    for path in ("advantage.eps", "kl.coefficient", "entropy.coefficient", "entropy.step", "positive_nll.coefficient"):
        if not 0 <= axes[path] < math.inf:
            found.append(f"algorithm.{path} is {axes[path]!r}, but must be a finite number of at least 0")
    found += model_values(axes)
    return found


def composition_warnings(values: Mapping[str, Any]) -> list[str]:
    """What is allowed and rarely meant."""
    axes = Axes(values)
    found = []
    if axes["level"] in ("seq_geo", "seq_geo_token") and axes.name("trust") == "clip":
        wide = {key: axes.argument("trust", key, 0.2) for key in ("lo", "hi")}
        for key, bound in wide.items():
            if isinstance(bound, int | float) and bound > 0.05:
                found.append(
                    f"algorithm.trust.{key} is {bound:g} with algorithm.level {axes['level']!r}: the geometric mean "
                    "of a sequence rarely moves that far; GSPO's own bounds are 3e-4 and 4e-4"
                )
    transform, reads = axes.name("advantage.transform"), (axes["advantage.center"], axes["advantage.scale"])
    if transform in ("rank", "best_worst") and reads != ("none", "none"):
        found.append(
            f"algorithm.advantage.transform {transform!r} makes the advantages of the order of the rewards alone: "
            f"algorithm.advantage.{{center, scale}} {reads[0]!r}, {reads[1]!r} have no effect; set both to none"
        )
    if axes["level"] == "none" and axes["anchor"] != "old":
        found.append(
            f"algorithm.anchor is {axes['anchor']!r} with algorithm.level 'none': without a ratio it has no effect"
        )
    if axes["kl.place"] == "loss" and axes["kl.coefficient"] == 0:
        found.append("algorithm.kl.place is 'loss' with algorithm.kl.coefficient 0: the reference pass has no effect")
    for term in ("kl", "entropy"):
        if axes[f"{term}.place"] == "none" and axes[f"{term}.coefficient"]:
            found.append(
                f"algorithm.{term}.coefficient is {axes[f'{term}.coefficient']:g} with algorithm.{term}.place 'none': "
                f"it has no effect; set algorithm.{term}.place to 'loss'"
            )
    return [*found, *unread_settings(axes)]


def _forms(axes: Axes) -> Iterator[str]:
    trust, form, level = axes.name("trust"), axes["form"], axes["level"]
    known = TRUST_FORMS.get(trust, "any")
    if known not in (form, "any"):
        fitting = ", ".join(sorted(name for name, other in TRUST_FORMS.items() if other in (form, "any")))
        yield (
            f"algorithm.form is {form!r} with algorithm.trust {trust!r}, which exists only in the form {known!r}: set "
            f"algorithm.form to {known!r}, or algorithm.trust to one of {fitting}"
        )
    if level == "none" and form == "ratio":
        yield (
            "algorithm.level is 'none' with algorithm.form 'ratio': a ratio of 1 has no gradient; set algorithm.form "
            "to 'score'"
        )
    if level == "none" and trust in TRUST_FORMS and trust != "none":
        yield (
            f"algorithm.level is 'none' with algorithm.trust {trust!r}: there is no ratio to bound; set "
            "algorithm.trust to none"
        )


def _levels(axes: Axes) -> Iterator[str]:
    trust, level = axes.name("trust"), axes["level"]
    allowed = TRUST_LEVELS.get(trust, ())
    if allowed and level not in (*allowed, "none"):
        yield (
            f"algorithm.trust {trust!r} needs algorithm.level {' or '.join(map(repr, allowed))}, but that is {level!r}"
        )
    if level == "geo_clip" and trust != "log_clip" and trust in TRUST_FORMS:
        yield (
            f"algorithm.level is 'geo_clip' with algorithm.trust {trust!r}, but it clips each token before the mean: "
            "set algorithm.trust to log_clip"
        )
    post = axes.name("advantage.post")
    if level in CONSTANT_ADVANTAGE_LEVELS and post in TOKEN_ADVANTAGE_POSTS:
        yield (
            f"algorithm.level is {level!r} with algorithm.advantage.post {post!r}: one ratio per sequence needs one "
            "advantage per sequence; use algorithm.level seq_geo_token or token"
        )


def _anchors(axes: Axes) -> Iterator[str]:
    anchor, trust, correction = axes["anchor"], axes.name("trust"), axes.name("correction")
    if anchor == "rollout" and correction in MISMATCH_WEIGHTS:
        yield (
            f"algorithm.anchor is 'rollout' with algorithm.correction {correction!r}: the ratio to the rollout policy "
            "already holds the mismatch; set algorithm.correction to none, rs or opsm, or algorithm.anchor to 'old'"
        )
    if trust == "div_mask" and anchor != "rollout":
        yield (
            "algorithm.trust 'div_mask' measures the distance to the rollout policy, but algorithm.anchor is "
            f"{anchor!r}: set it to 'rollout'"
        )


def _corrections(axes: Axes) -> Iterator[str]:
    correction, level = axes.name("correction"), axes["level"]
    if correction not in MISMATCH_WEIGHTS:
        return
    is_token = correction in ("icepop", "seq_mask_tis") or axes.argument("correction", "level", "token") == "token"
    if axes.name("trust") == "gamma_kernel" and not is_token:
        yield (
            f"algorithm.trust is 'gamma_kernel' with algorithm.correction {correction!r} of level "
            f"{axes.argument('correction', 'level', 'token')!r}: the weights of an answer's tokens multiply inside the "
            "kernel's ratio, where one weight for all of them would count once a token; set "
            "algorithm.correction.level to token"
        )
    if level != "geo_clip":
        return
    if not is_token or axes.argument("correction", "w_reduce", "none") == "geo_mean":
        return
    fixes = {
        "tis": "algorithm.correction.level to seq or geo, or algorithm.correction.w_reduce to geo_mean",
        "mis": "algorithm.correction.level to seq or geo",
        "seq_mask_tis": "algorithm.correction.w_reduce to geo_mean",
        "icepop": "algorithm.correction to mis with level seq or geo",
    }
    yield (
        f"algorithm.level is 'geo_clip' with token weights of algorithm.correction {correction!r}: a geometric mean "
        f"takes one weight per sequence; set {fixes[correction]}"
    )


def _router_shift(axes: Axes) -> Iterator[str]:
    if not axes["router_shift.enabled"]:
        return
    level, stage = axes["level"], axes["router_shift.stage"]
    if stage == "after_clip" and level != "geo_clip":
        yield (
            f"algorithm.router_shift.stage is 'after_clip' with algorithm.level {level!r}, but it acts inside GMPO's "
            "mean: set algorithm.router_shift.stage to 'before_clip', or algorithm.level to 'geo_clip'"
        )
    if level == "none":
        yield (
            "algorithm.router_shift.enabled is true with algorithm.level 'none': there is no ratio to shift; choose "
            "another level"
        )


def _kl(axes: Axes) -> Iterator[str]:
    if axes["kl.place"] != "loss":
        return
    importance, straight = axes["kl.importance"], axes["kl.straight_through"]
    if axes["kl.estimator"] == "k1" and not importance and not straight and not axes["kl.force"]:
        yield (
            "algorithm.kl.estimator is 'k1' with algorithm.kl.place 'loss': its expected gradient is 0; use k2 or "
            "k3, or set algorithm.kl.importance or algorithm.kl.straight_through, or algorithm.kl.force to keep it"
        )
    if importance and straight:
        yield "algorithm.kl.importance and algorithm.kl.straight_through are both true; choose one"
