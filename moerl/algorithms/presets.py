"""Named methods: each is data, a point of the space that `config/schema.py` spans; torch-free.

`${...}` is resolved by the configuration. What a method asks of keys outside the algorithm section is in `elsewhere`.
"""

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


_GROUP = {"center": "group_mean", "scale": "group_std"}
_GROUP_MEAN = {"center": "group_mean", "scale": "none"}
_RAW_REWARD = {"center": "none", "scale": "none"}
_VALUE = {"center": "value", "scale": "none", "post": {"name": "whiten_tokens"}}
_KL_REWARD = {"place": "reward", "estimator": "k1"}
_TOKEN_MEAN = {"name": "token_mean"}
_SEQ_MEAN = {"name": "seq_mean_token_mean"}
_SEQ_SUM = {"name": "seq_mean_token_sum"}
_BUDGET = {"name": "fixed_denominator", "tokens": "${rollout.max_new_tokens}"}
_ZERO_VARIANCE = {"name": "zero_variance"}
_SOFT_OVERLONG = {"name": "overlong", "max_tokens": "${rollout.max_new_tokens}"}
_REFILL_ROUNDS = 4


def _clip(lo: float, hi: float) -> Values:
    return {"name": "clip", "lo": lo, "hi": hi}


def _kl(coefficient: float, estimator: str = "k3") -> Values:
    return {"place": "loss", "estimator": estimator, "coefficient": coefficient}


def _ppo(advantage: Values, aggregation: Values, lo: float = 0.2, hi: float = 0.2, **more: Any) -> Values:
    """A token ratio with PPO's clip."""
    return {
        "advantage": advantage,
        "level": "token",
        "form": "ratio",
        "trust": _clip(lo, hi),
        "aggregation": aggregation,
        **more,
    }


def _gspo(level: str, lo: float, hi: float, aggregation: Values, **more: Any) -> Values:
    return {
        "advantage": _GROUP,
        "level": level,
        "form": "ratio",
        "trust": _clip(lo, hi),
        "aggregation": aggregation,
        **more,
    }


def _score(advantage: Values, aggregation: Values, trust: Values, **more: Any) -> Values:
    return {
        "advantage": advantage,
        "form": "score",
        "trust": trust,
        "aggregation": aggregation,
        **{"level": "token", **more},
    }


def _gmpo(**more: Any) -> Values:
    trust = {"name": "log_clip", "lo": 0.4, "hi": 0.4}
    return {"advantage": _GROUP, "level": "geo_clip", "form": "ratio", "trust": trust, "aggregation": _SEQ_MEAN, **more}


def _shift(stage: str) -> Values:
    return {"enabled": True, "stage": stage, "gamma_min": 0.8}


def _dppo(kind: str, delta: float) -> Values:
    trust = {"name": "div_mask", "kind": kind, "delta": delta, "cap": 10.0}
    return _score(_GROUP_MEAN, _BUDGET, trust, anchor="rollout")


_SIGNED = {"reward": "rewards must be -1 (wrong) and +1 (right)"}

PRESETS: dict[str, Preset] = {
    "sft": Preset(
        _score(_RAW_REWARD, _TOKEN_MEAN, {"name": "none"}, level="none"),
        "supervised training: mean negative logprob of the file's own completions (every advantage is 1)",
        "-",
        {"rollout.engine.name": "dataset"},
    ),
    "reinforce": Preset(
        _score(_RAW_REWARD, _SEQ_SUM, {"name": "none"}, level="none"),
        "the plain score-function gradient, no baseline",
        "-",
    ),
    "grpo": Preset(
        _ppo(_GROUP, _SEQ_MEAN, kl=_kl(0.04)),
        "group-normalised rewards, token clip, KL to the reference in the loss",
        "2402.03300",
    ),
    "two_grpo": Preset(
        _ppo({**_GROUP, "std_ddof": 0}, _SEQ_MEAN),
        "GRPO with two answers a prompt",
        "2510.00977",
        {"rollout.group_size": 2},
    ),
    "dr_grpo": Preset(_ppo(_GROUP_MEAN, _BUDGET), "GRPO without the std and with a constant length", "2503.20783"),
    "dr_grpo_batch_norm": Preset(
        _ppo({"center": "batch_mean", "scale": "batch_std_raw"}, _SEQ_MEAN),
        "what one survey describes as Dr. GRPO",
        "survey",
    ),
    "dapo": Preset(
        _ppo(
            _GROUP,
            _TOKEN_MEAN,
            0.2,
            0.28,
            filters=[{"name": "overlong"}, _ZERO_VARIANCE],
            shaping=[_SOFT_OVERLONG],
            refill_rounds=_REFILL_ROUNDS,
        ),
        "clip-higher, token mean, groups without spread sampled anew, overlong answers masked and punished softly",
        "2503.14476",
        {"rollout.group_size": 16},
    ),
    "clip_dapo": Preset(
        _ppo(_GROUP, _TOKEN_MEAN, filters=[_ZERO_VARIANCE]),
        "a survey's DAPO: symmetric clip, no overlong treatment",
        "survey",
    ),
    "dapo_unclipped": Preset(
        {**_ppo(_GROUP, _TOKEN_MEAN, filters=[_ZERO_VARIANCE]), "trust": {"name": "none"}},
        "a survey's DAPO without any clip",
        "survey",
    ),
    "gspo": Preset(
        _gspo("seq_geo", 3e-4, 4e-4, _SEQ_MEAN),
        "one geometric-mean ratio per sequence, clipped as a whole",
        "2507.18071",
    ),
    "gspo_token": Preset(
        _gspo("seq_geo_token", 3e-4, 4e-4, _SEQ_MEAN),
        "GSPO's ratio with an advantage that may differ per token",
        "2507.18071",
    ),
    "luspo": Preset(
        _gspo("seq_geo", 2e-3, 2.5e-3, _SEQ_SUM),
        "GSPO weighted by length, so that length is not punished",
        "2602.05261",
    ),
    "gmpo": Preset(_gmpo(), "geometric mean of token ratios, each clipped in log space first", "2507.20673"),
    "rspo": Preset(
        _gmpo(router_shift=_shift("before_clip")), "GMPO with ratios shrunk by how far the routers moved", "2510.23027"
    ),
    "grpo_rs": Preset(
        _ppo(_GROUP, _SEQ_MEAN, kl=_kl(0.04), router_shift=_shift("before_clip")),
        "GRPO with the router-shift factor",
        "2510.23027",
    ),
    "gspo_rs": Preset(
        _gspo("seq_geo", 3e-4, 4e-4, _SEQ_MEAN, router_shift=_shift("before_clip")),
        "GSPO with the router-shift factor",
        "2510.23027",
    ),
    "gmpo_rs_v1": Preset(
        _gmpo(router_shift=_shift("after_clip")),
        "the first version of RSPO: the factor multiplies after the clip",
        "2510.23027v1",
    ),
    "cispo": Preset(
        _score(
            _GROUP,
            _TOKEN_MEAN,
            {"name": "is_clip", "min": 0.0, "max": 5.0},
            filters=[_ZERO_VARIANCE],
            shaping=[_SOFT_OVERLONG],
        ),
        "importance weights are capped, no token loses its gradient (the cap is ScaleRL's: the paper gives none)",
        "2506.13585",
    ),
    "cispo_min_clip": Preset(
        _ppo(
            {"center": "batch_mean", "scale": "batch_std_raw"}, _TOKEN_MEAN, 0.2, 0.28, filters=[{"name": "overlong"}]
        ),
        "what one survey describes as CISPO: a clipped surrogate with batch-normalised advantages",
        "survey",
    ),
    "scalerl_loss": Preset(
        _score(
            {"center": "group_mean", "scale": "batch_std_centered"},
            {"name": "prompt_mean"},
            {"name": "is_clip", "min": 0.0, "max": 5.0},
            anchor="rollout",
            filters=[_ZERO_VARIANCE],
        ),
        "ScaleRL's objective alone: its retirement of solved prompts, fp32 head and asynchrony are not part of it",
        "2510.13786",
    ),
    "sapo": Preset(
        {**_ppo(_GROUP, _SEQ_MEAN), "trust": {"name": "soft_gate", "tau_pos": 1.0, "tau_neg": 1.05}},
        "a sigmoid gate in place of the clip",
        "2511.20347",
    ),
    "vespo": Preset(
        _score(
            _GROUP,
            _TOKEN_MEAN,
            {"name": "gamma_kernel", "k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0},
            level="seq_prod",
            anchor="rollout",
        ),
        "a kernel of the whole sequence's ratio to the rollout policy",
        "2602.10693",
    ),
    "dppo_tv": Preset(
        _dppo("binary_tv", 0.15), "tokens too far from the rollout policy in total variation are dropped", "2602.04879"
    ),
    "dppo_kl": Preset(_dppo("binary_kl", 0.05), "as dppo_tv, by KL", "2602.04879"),
    "minirl": Preset(
        _score(_GROUP_MEAN, _SEQ_SUM, {"name": "ratio_mask", "lo": 0.2, "hi": 0.27, "cap": 5.0}, anchor="rollout"),
        "the baseline on which routing replay is measured; set algorithm.routing to R2 or R3",
        "2512.01374",
    ),
    "lite_ppo": Preset(
        _ppo({"center": "group_mean", "scale": "batch_std_raw"}, _TOKEN_MEAN),
        "group mean, batch std, token mean",
        "2508.08221",
    ),
    "olmo3": Preset(
        _ppo(
            _GROUP_MEAN,
            _TOKEN_MEAN,
            0.2,
            0.272,
            correction={"name": "tis", "level": "token", "cap": 2.0},
            filters=[_ZERO_VARIANCE],
            refill_rounds=_REFILL_ROUNDS,
        ),
        "clip-higher with truncated importance weights and refilled batches",
        "2512.13961",
        {"rollout.group_size": 8, "rollout.prompts_per_step": 64},
    ),
    "icepop": Preset(
        _ppo(_GROUP, _SEQ_MEAN, correction={"name": "icepop", "min": 0.5, "max": 5.0}),
        "tokens on which trainer and engine disagree too much are dropped",
        "2510.18855",
    ),
    "cisco": Preset(
        _ppo(_GROUP, _SEQ_MEAN, kl=_kl(0.04), correction={"name": "tis", "level": "token", "cap": 2.0}),
        "a survey's constrained importance sampling: GRPO with truncated weights to the data-collecting policy",
        "survey",
    ),
    "gopo": Preset(
        _ppo({**_RAW_REWARD, "transform": {"name": "rank", "range": 2.0}}, _SEQ_MEAN, kl=_kl(0.04)),
        "ranks within the group in place of rewards",
        "2602.03876",
    ),
    "gdpo": Preset(
        _ppo({**_GROUP, "transform": {"name": "decoupled", "batch_norm": True}}, _SEQ_MEAN),
        "every reward component normalised in its group before they are summed",
        "2601.05242",
    ),
    "ppo": Preset(
        _ppo(_VALUE, _TOKEN_MEAN, critic={"init": "policy"}, kl={**_KL_REWARD, "coefficient": 0.01}),
        "a critic's GAE advantages, whitened over tokens, KL to the reference in the reward",
        "1707.06347",
    ),
    "vapo": Preset(
        _ppo(
            {**_VALUE, "gae_alpha": 0.05},
            _TOKEN_MEAN,
            0.2,
            0.28,
            critic={"init": "policy", "gae_lambda": 1.0, "pretrain_steps": 50},
            positive_nll={"coefficient": 0.1},
        ),
        "PPO with a lambda that follows the answer's length, plain returns for a critic that trains first, "
        "clip-higher, and a likelihood term on right answers",
        "2504.05118",
    ),
    "reinforce_pp_loo": Preset(
        _ppo({"center": "group_loo", "scale": "none"}, _SEQ_MEAN, kl=_kl(0.04)),
        "what one survey describes as REINFORCE++: leave-one-out advantages in GRPO's loss",
        "survey",
    ),
    "reinforce_rej": Preset(
        _ppo(_RAW_REWARD, _SEQ_MEAN, filters=[_ZERO_VARIANCE]),
        "no baseline; prompts that are all right or all wrong are dropped",
        "2504.11343",
        _SIGNED,
    ),
    "raft_pp": Preset(
        _ppo(_RAW_REWARD, _SEQ_MEAN, filters=[{"name": "positives_only"}]),
        "train on the right answers only",
        "2504.11343",
        _SIGNED,
    ),
}
"""Methods by name. One that would need a part that is not built is not here."""
