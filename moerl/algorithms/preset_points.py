"""What presets are made of: the record, and the points of the space that several methods share; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """One named method."""

    values: Values
    """Nested, in the keys of the algorithm section; complete: what is not here has the schema's default."""
    summary: str
    paper: str
    """arXiv id, or where the method comes from."""
    elsewhere: Values = field(default_factory=dict)
    """Dotted keys outside the algorithm section that belong to the method as published; not applied, only shown."""


GROUP = {"center": "group_mean", "scale": "group_std"}
GROUP_MEAN = {"center": "group_mean", "scale": "none"}
RAW_REWARD = {"center": "none", "scale": "none"}
VALUE = {"center": "value", "scale": "none", "post": {"name": "whiten_tokens"}}
KL_REWARD = {"place": "reward", "estimator": "k1"}
TOKEN_MEAN = {"name": "token_mean"}
SEQ_MEAN = {"name": "seq_mean_token_mean"}
SEQ_SUM = {"name": "seq_mean_token_sum"}
BUDGET = {"name": "fixed_denominator", "tokens": "${rollout.max_new_tokens}"}
ZERO_VARIANCE = {"name": "zero_variance"}
SOFT_OVERLONG = {"name": "overlong", "max_tokens": "${rollout.max_new_tokens}"}
REFILL_ROUNDS = 4


def clip_point(lo: float, hi: float) -> Values:
    """The clip at these bounds."""
    return {"name": "clip", "lo": lo, "hi": hi}


def kl_point(coefficient: float, estimator: str = "k3") -> Values:
    """A KL to the reference in the loss."""
    return {"place": "loss", "estimator": estimator, "coefficient": coefficient}


def ppo_point(advantage: Values, aggregation: Values, lo: float = 0.2, hi: float = 0.2, **more: Any) -> Values:
    """A token ratio with PPO's clip."""
    return {
        "advantage": advantage,
        "level": "token",
        "form": "ratio",
        "trust": clip_point(lo, hi),
        "aggregation": aggregation,
        **more,
    }


def gspo_point(level: str, lo: float, hi: float, aggregation: Values, **more: Any) -> Values:
    """A ratio per sequence with a clip."""
    return {
        "advantage": GROUP,
        "level": level,
        "form": "ratio",
        "trust": clip_point(lo, hi),
        "aggregation": aggregation,
        **more,
    }


def score_point(advantage: Values, aggregation: Values, trust: Values, **more: Any) -> Values:
    """A detached weight times the logprob."""
    return {
        "advantage": advantage,
        "form": "score",
        "trust": trust,
        "aggregation": aggregation,
        **{"level": "token", **more},
    }


def gmpo_point(**more: Any) -> Values:
    """Log-ratios clipped, then averaged."""
    trust = {"name": "log_clip", "lo": 0.4, "hi": 0.4}
    return {"advantage": GROUP, "level": "geo_clip", "form": "ratio", "trust": trust, "aggregation": SEQ_MEAN, **more}


def shift_point(stage: str) -> Values:
    """The router-shift factor."""
    return {"enabled": True, "stage": stage, "gamma_min": 0.8}


def dppo_point(kind: str, delta: float) -> Values:
    """A divergence mask against the rollout policy."""
    trust = {"name": "div_mask", "kind": kind, "delta": delta, "cap": 10.0}
    return score_point(GROUP_MEAN, BUDGET, trust, anchor="rollout")
