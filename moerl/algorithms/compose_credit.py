"""Which values of the credit axes go together: what waits for the score pass, pairs, schedules; torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from moerl.algorithms.axes import Axes
from moerl.config.schema import AdvantageSection

CONSTANT_ADVANTAGE_LEVELS = frozenset({"seq_geo", "seq_prod", "geo_clip"})
TOKEN_ADVANTAGE_POSTS = frozenset({"whiten_tokens"})

READS_CURRENT_POLICY = frozenset({"opsm"})
"""Corrections whose verdict changes while the policy moves."""
READS_OWN_REJECTS = frozenset({"vaco"})
"""Corrections that drop tokens by a statistic of the whole answer."""


def rejected(axes: Axes) -> Iterator[str]:
    """What is removed must be known after the score pass, once and for all."""
    if axes.argument("correction", "rejected", "keep_denominator") != "remove":
        return
    correction = axes.name("correction")
    keep = "set algorithm.correction.rejected to keep_denominator"
    follows = correction == "rs" and axes.argument("correction", "policy", "old") == "current"
    if correction in READS_CURRENT_POLICY or follows:
        yield (
            f"algorithm.correction.rejected is 'remove' with algorithm.correction {correction!r}, whose verdict is not "
            f"known before the update: {keep}"
        )
    if correction in READS_OWN_REJECTS:
        yield (
            f"algorithm.correction.rejected is 'remove' with algorithm.correction {correction!r}: the answer's "
            f"statistic would change with what it removes; {keep}"
        )
    if axes.name("trust") == "div_mask":
        yield (
            "algorithm.correction.rejected is 'remove' with algorithm.trust 'div_mask', which drops tokens by the "
            f"current policy: {keep}, or choose another trust region"
        )


def credits_tokens(advantage: AdvantageSection) -> bool:
    """Whether rewards of single tokens stay with the tokens: the advantage is the plain reward, neither centred nor
    scaled nor transformed, or GAE of it.
    """
    return _keeps_tokens(advantage.center, advantage.scale, str(advantage.transform.get("name")))


def _credits_tokens(axes: Axes) -> bool:
    return _keeps_tokens(axes["advantage.center"], axes["advantage.scale"], axes.name("advantage.transform"))


def _keeps_tokens(center: str, scale: str, transform: str) -> bool:
    return center in ("none", "value") and (scale, transform) == ("none", "identity")


def coefficients(axes: Axes) -> Iterator[str]:
    """KL and entropy: place, estimator, target."""
    if axes["kl.place"] == "reward":
        if axes["kl.estimator"] != "k1":
            yield (
                f"algorithm.kl.place is 'reward' with algorithm.kl.estimator {axes['kl.estimator']!r}: the KL in the "
                "reward is k1, which is unbiased; set algorithm.kl.estimator to 'k1'"
            )
        for name in ("importance", "straight_through"):
            if axes[f"kl.{name}"]:
                yield (
                    f"algorithm.kl.place is 'reward' with algorithm.kl.{name}: a reward has no gradient to choose; set "
                    f"algorithm.kl.{name} to false"
                )
        if axes.name("advantage.transform") == "decoupled":
            yield (
                "algorithm.kl.place is 'reward' with algorithm.advantage.transform 'decoupled', which brings every "
                "component to one size, so that the KL would count the same whatever its coefficient; set "
                "algorithm.kl.place to 'loss'"
            )
    if axes["kl.target"] is not None and axes["kl.place"] == "none":
        yield (
            "algorithm.kl.target is set with algorithm.kl.place 'none': there is no KL to hold; set algorithm.kl.place"
        )
    if axes["entropy.target"] is not None and axes["entropy.place"] == "none":
        yield (
            "algorithm.entropy.target is set with algorithm.entropy.place 'none': there is no bonus to adapt; set "
            "algorithm.entropy.place"
        )


def token_credit(axes: Axes) -> Iterator[str]:
    """Rewards of single tokens need a ratio per token."""
    level = axes["level"]
    if level not in CONSTANT_ADVANTAGE_LEVELS:
        return
    places = {
        "kl": axes["kl.place"] == "reward" and _credits_tokens(axes),
        "entropy": axes["entropy.place"] == "reward",
    }
    for term, differs in places.items():
        if differs:
            yield (
                f"algorithm.level is {level!r} with algorithm.{term}.place 'reward', which gives every token its own "
                "advantage: one ratio per sequence needs one advantage per sequence; use algorithm.level "
                f"seq_geo_token or token, or algorithm.{term}.place 'loss'"
            )


def clamp(axes: Axes) -> Iterator[str]:
    """A clamp bounds the answer's advantage, before tokens get theirs."""
    if axes.name("advantage.post") != "clamp":
        return
    later = {
        "algorithm.advantage.center 'value'": axes["advantage.center"] == "value",
        "algorithm.kl.place 'reward'": axes["kl.place"] == "reward" and _credits_tokens(axes),
        "algorithm.entropy.place 'reward'": axes["entropy.place"] == "reward",
        "algorithm.teacher.place 'reward'": axes["teacher.path"] is not None and axes["teacher.place"] == "reward",
    }
    for what, is_set in later.items():
        if is_set:
            yield (
                f"algorithm.advantage.post is 'clamp' with {what}, which gives every token its own advantage after "
                "the clamp: it would bound the answer's reward and not what trains; set algorithm.advantage.post to "
                "whiten_tokens or none"
            )


def history(axes: Axes) -> Iterator[str]:
    """DCPO's statistics of prompts."""
    center, transform = axes["advantage.center"], axes.name("advantage.transform")
    if (center == "history") != (transform == "sas"):
        yield (
            f"algorithm.advantage.center is {center!r} with algorithm.advantage.transform {transform!r}: 'history' and "
            "'sas' belong together (DCPO); set both or neither"
        )
    if transform != "sas":
        return
    again = {
        "algorithm.kl.place 'reward'": axes["kl.place"] == "reward",
        "algorithm.correction.rejected 'remove'": axes.argument("correction", "rejected", "") == "remove",
    }
    for what, is_set in again.items():
        if is_set:
            yield (
                f"algorithm.advantage.transform is 'sas' with {what}, which credits answers a second time after the "
                "score pass: a prompt's statistics would count them twice; drop one of the two"
            )


def token_weight(axes: Axes) -> Iterator[str]:
    """A geometric mean has one weight per sequence."""
    weight, level = axes.name("token_weight"), axes["level"]
    if weight != "one" and level == "geo_clip":
        yield (
            f"algorithm.level is 'geo_clip' with algorithm.token_weight {weight!r}: a geometric mean takes one weight "
            "per sequence; set algorithm.token_weight to one"
        )


def schedule(axes: Axes) -> Iterator[str]:
    """Lopti cuts answers, which nothing over whole answers survives."""
    if axes.name("schedule") != "lopti":
        return
    level, correction = axes["level"], axes.name("correction")
    if level not in ("none", "token"):
        yield (
            f"algorithm.schedule is 'lopti' with algorithm.level {level!r}: each update sees a part of an answer's "
            "tokens, and the ratio would be of that part; set algorithm.level to 'token'"
        )
    by_answer = correction in ("seq_mask_tis", "opsm", "vaco")
    by_answer = by_answer or (correction in ("tis", "mis") and axes.argument("correction", "level", "token") != "token")
    by_answer = by_answer or (correction == "rs" and axes.argument("correction", "stat", "seq_mean") != "token")
    if by_answer:
        yield (
            f"algorithm.schedule is 'lopti' with algorithm.correction {correction!r} over whole answers, of which each "
            "update sees a part: use its token form, or algorithm.correction none"
        )


def pairs(axes: Axes) -> Iterator[str]:
    """Group DPO takes nothing but pairs."""
    if axes.name("objective") != "group_dpo":
        return
    needed = {"advantage.transform": "best_worst", "aggregation": "prompt_mean", "schedule": "joint"}
    for axis, name in needed.items():
        if axes.name(axis) != name:
            yield (
                f"algorithm.objective is 'group_dpo' with algorithm.{axis} {axes.name(axis)!r}: it compares the best "
                f"and the worst answer of each group; set algorithm.{axis} to {name}"
            )
    if axes.name("advantage.post") != "none":
        yield (
            f"algorithm.objective is 'group_dpo' with algorithm.advantage.post {axes.name('advantage.post')!r}: the "
            "advantage only says which answer is which; set algorithm.advantage.post to none"
        )
    if axes["kl.place"] == "reward" or axes["entropy.place"] == "reward":
        yield (
            "algorithm.objective is 'group_dpo' with KL or entropy in the reward: pairs are chosen before the score "
            "pass; set algorithm.kl.place and algorithm.entropy.place to none or loss"
        )
    if axes.argument("correction", "rejected", "") == "remove" or axes.name("correction") != "none":
        yield (
            f"algorithm.objective is 'group_dpo' with algorithm.correction {axes.name('correction')!r}: it has no "
            "importance weight to correct; set algorithm.correction to none"
        )


CREDIT_RULES = (rejected, coefficients, token_credit, clamp, history, token_weight, schedule, pairs)
