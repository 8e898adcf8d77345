"""Which values of critic, reference and teacher go together, with one another and with the axes; torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moerl.algorithms.axes import Axes
from moerl.algorithms.compose_credit import CONSTANT_ADVANTAGE_LEVELS


def critic(axes: Axes) -> Iterator[str]:
    """Values need a critic, and a critic needs values."""
    center, init = axes["advantage.center"], axes["critic.init"]
    if center == "value" and init == "none":
        yield (
            "algorithm.advantage.center is 'value' with algorithm.critic.init 'none': values come from a critic; set "
            "algorithm.critic.init to policy, or to the folder of a model or of a checkpoint with a critic"
        )
    if center != "value" and init != "none":
        yield (
            f"algorithm.critic.init is {init!r} with algorithm.advantage.center {center!r}, which reads no values: set "
            "algorithm.advantage.center to value, or algorithm.critic.init to none"
        )
    if center != "value":
        if axes["advantage.gae_alpha"] is not None:
            yield (
                f"algorithm.advantage.gae_alpha is {axes['advantage.gae_alpha']!r} with algorithm.advantage.center "
                f"{center!r}, which has no lambda: set it to null, or algorithm.advantage.center to value"
            )
        if axes["advantage.gamma"] != 1:
            yield (
                f"algorithm.advantage.gamma is {axes['advantage.gamma']!r} with algorithm.advantage.center {center!r}, "
                "which discounts nothing: set it to 1, or algorithm.advantage.center to value"
            )
        return
    if axes["advantage.scale"] != "none" or axes.name("advantage.transform") != "identity":
        yield (
            "algorithm.advantage.center is 'value' with algorithm.advantage.scale "
            f"{axes['advantage.scale']!r} and transform {axes.name('advantage.transform')!r}: GAE takes the plain "
            "reward; set scale to none and transform to identity (algorithm.advantage.post may be whiten_tokens)"
        )
    if axes["level"] in CONSTANT_ADVANTAGE_LEVELS:
        yield (
            f"algorithm.advantage.center is 'value' with algorithm.level {axes['level']!r}: GAE gives every token its "
            "own advantage, and one ratio per sequence needs one; use algorithm.level token or seq_geo_token"
        )


def teacher(axes: Axes) -> Iterator[str]:
    """A teacher's reward differs by token."""
    if axes["teacher.path"] is None:
        return
    if axes["teacher.place"] == "reward" and axes["level"] in CONSTANT_ADVANTAGE_LEVELS:
        yield (
            f"algorithm.teacher.place is 'reward' with algorithm.level {axes['level']!r}: the teacher gives every "
            "token its own advantage, and one ratio per sequence needs one; use algorithm.level token or "
            "seq_geo_token, or algorithm.teacher.place kl"
        )
    if axes["teacher.place"] == "reward" and axes.name("objective") == "group_dpo":
        yield (
            "algorithm.teacher.place is 'reward' with algorithm.objective 'group_dpo', which reads no advantages of "
            "tokens: set algorithm.teacher.place to kl"
        )


def reference(axes: Axes) -> Iterator[str]:
    """Only what is measured to can move."""
    if not axes["reference.update_every_steps"]:
        return
    reads = axes["kl.place"] != "none" or axes.name("objective") == "group_dpo"
    if not reads and axes.name("token_weight") != "one_minus_ref_prob":
        yield (
            f"algorithm.reference.update_every_steps is {axes['reference.update_every_steps']!r}, but nothing reads "
            "the reference's logprobs, so that there is no reference to move: set algorithm.kl.place, or set it to 0"
        )


def model_values(axes: Axes) -> Iterator[str]:
    """Bounds of the numbers of critic, reference, teacher and GAE."""
    shares = ("advantage.gae_lambda", "critic.gae_lambda")
    for path in shares:
        if axes[path] is not None and not 0 <= axes[path] <= 1:
            yield f"algorithm.{path} is {axes[path]!r}, but must be in [0, 1]"
    if not 0 < axes["advantage.gamma"] <= 1:
        yield f"algorithm.advantage.gamma is {axes['advantage.gamma']!r}, but must be in (0, 1]"
    if not 0 <= axes["reference.ema"] < 1:
        yield f"algorithm.reference.ema is {axes['reference.ema']!r}, but must be in [0, 1): 1 would never move it"
    for path in ("advantage.gae_alpha", "critic.value_clip"):
        if axes[path] is not None and not 0 < axes[path] < math.inf:
            yield f"algorithm.{path} is {axes[path]!r}, but must be a finite number above 0, or null"
    at_least_zero = ("lr", "warmup_steps", "clip_grad_norm", "pretrain_steps")
    for path in (*(f"critic.{name}" for name in at_least_zero), "reference.update_every_steps", "teacher.coefficient"):
        if not 0 <= axes[path] < math.inf:
            yield f"algorithm.{path} is {axes[path]!r}, but must be a finite number of at least 0"


MODEL_RULES = (critic, teacher, reference)
