"""Settings of `algorithm` that nothing reads, because what they belong to is off; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moerl.algorithms.axes import Axes

_Switch = tuple[str, Callable[[Axes], bool], tuple[str, ...]]

SWITCHES: tuple[_Switch, ...] = (
    (
        "algorithm.advantage.center is not 'value'",
        lambda axes: axes["advantage.center"] != "value",
        ("advantage.gae_lambda",),
    ),
    (
        "algorithm.kl.place is 'none'",
        lambda axes: axes["kl.place"] == "none",
        ("kl.importance", "kl.straight_through", "kl.force", "term_aggregation.kl"),
    ),
    (
        "algorithm.kl.place is 'reward'",
        lambda axes: axes["kl.place"] == "reward",
        ("kl.importance", "kl.straight_through", "kl.force", "term_aggregation.kl"),
    ),
    (
        "algorithm.entropy.place is 'none'",
        lambda axes: axes["entropy.place"] == "none",
        ("entropy.step", "term_aggregation.entropy"),
    ),
    (
        "algorithm.positive_nll.coefficient is 0",
        lambda axes: not axes["positive_nll.coefficient"],
        ("positive_nll.threshold", "term_aggregation.nll"),
    ),
    (
        "algorithm.router_shift.enabled is false",
        lambda axes: not axes["router_shift.enabled"],
        ("router_shift.stage", "router_shift.gamma_min"),
    ),
    (
        "algorithm.critic.init is 'none'",
        lambda axes: axes["critic.init"] == "none",
        (
            *(f"critic.{name}" for name in ("lr", "warmup_steps", "clip_grad_norm", "value_clip", "gae_lambda")),
            "critic.pretrain_steps",
            "term_aggregation.value",
        ),
    ),
    (
        "algorithm.reference.update_every_steps is 0",
        lambda axes: not axes["reference.update_every_steps"],
        ("reference.ema",),
    ),
    (
        "algorithm.teacher.path is null",
        lambda axes: axes["teacher.path"] is None,
        ("teacher.place", "teacher.coefficient"),
    ),
    (
        "algorithm.filters is empty",
        lambda axes: not axes["filters"],
        ("refill_rounds",),
    ),
)
"""Why nothing reads them, whether that is so, and the paths."""


def unread_settings(axes: Axes) -> Iterator[str]:
    """One line for each setting that was moved from its default and has no effect."""
    for why, is_off, paths in SWITCHES:
        moved = filter(axes.is_moved, paths) if is_off(axes) else ()
        yield from (f"algorithm.{path} is set, but has no effect: {why}" for path in moved)
