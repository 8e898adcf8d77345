"""Methods whose credit differs by token, waits for the score pass, or remembers prompts. Part of `presets.py`."""

from __future__ import annotations

from typing import Any

from moerl.algorithms.preset_points import (
    BUDGET,
    GROUP,
    GROUP_MEAN,
    KL_REWARD,
    RAW_REWARD,
    SEQ_SUM,
    TOKEN_MEAN,
    ZERO_VARIANCE,
    Preset,
    Values,
    dppo_point,
    kl_point,
    ppo_point,
    score_point,
)


def _lopti(**more: Any) -> Values:
    trust = {"name": "clip", "lo": 0.2, "hi": 0.24, "dual_c": 10.0}
    schedule = {"name": "lopti", "eta": 0.5}
    point = ppo_point(GROUP, TOKEN_MEAN, kl=kl_point(0.001), schedule=schedule, **more)
    return {**point, "trust": trust}


_EIGHT = {"rollout.group_size": 8}

TOKEN_PRESETS: dict[str, Preset] = {
    "rloo": Preset(
        score_point(
            {"center": "group_loo", "scale": "none"},
            SEQ_SUM,
            {"name": "none"},
            level="none",
            kl={**KL_REWARD, "coefficient": 0.03},
        ),
        "the score-function gradient against the mean of the other answers, KL to the reference in the reward",
        "2402.14740",
    ),
    "reinforce_pp": Preset(
        ppo_point({**RAW_REWARD, "post": {"name": "whiten_tokens"}}, TOKEN_MEAN, kl={**KL_REWARD, "coefficient": 0.01}),
        "per-token returns with KL in the reward, whitened over the batch, no group needed",
        "2501.03262",
    ),
    "reinforce_pp_baseline": Preset(
        ppo_point({"center": "group_mean", "scale": "batch_std_centered"}, TOKEN_MEAN, kl=kl_point(0.01, "k2")),
        "REINFORCE++ with the group's mean as baseline and a k2 KL in the loss",
        "2501.03262",
    ),
    "dcpo": Preset(
        {
            **ppo_point(
                {"center": "history", "scale": "group_std", "transform": {"name": "sas"}},
                {"name": "seq_sum_token_mean"},
            ),
            "trust": {"name": "dyn_clip", "lo": 0.16, "hi": 0.2, "max": 10.0, "dual_c": 10.0},
        },
        "clip bounds that widen for rare tokens, advantages smoothed over a prompt's visits",
        "2509.02333",
    ),
    "dr_grpo_ref_weighted": Preset(
        ppo_point(GROUP_MEAN, BUDGET, kl=kl_point(0.04), token_weight={"name": "one_minus_ref_prob"}),
        "what another survey describes as Dr. GRPO: tokens that the reference finds unlikely count more",
        "survey",
    ),
    "lopti": Preset(
        _lopti(), "two optimizer updates per minibatch, rare tokens first, then the others", "2505.12929", _EIGHT
    ),
    "ar_lopti": Preset(
        _lopti(token_weight={"name": "prob_reweight", "alpha": 0.3}),
        "lopti with advantages reweighted by the old probability",
        "2505.12929",
        _EIGHT,
    ),
    "group_dpo": Preset(
        {
            "objective": {"name": "group_dpo", "beta": 0.1},
            "advantage": {"center": "none", "scale": "none", "transform": {"name": "best_worst"}},
            "level": "none",
            "form": "score",
            "trust": {"name": "none"},
            "aggregation": {"name": "prompt_mean"},
        },
        "a survey's GDPO: the best answer of each group is preferred to the worst, as in DPO",
        "survey",
    ),
    "scalerl": Preset(
        score_point(
            {"center": "group_mean", "scale": "batch_std_centered"},
            {"name": "prompt_mean"},
            {"name": "is_clip", "min": 0.0, "max": 5.0},
            anchor="rollout",
            filters=[ZERO_VARIANCE, {"name": "no_positive_resampling", "threshold": 0.9}],
        ),
        "capped weights to the rollout policy, mean over prompts, batch-scaled advantages, solved prompts retired",
        "2510.13786",
        {"rollout.max_staleness": 8, "precision.head": "fp32"},
    ),
    "dppo_topk_tv": Preset(dppo_point("topk_tv", 0.15), "as dppo_tv, over the engine's likeliest tokens", "2602.04879"),
    "dppo_topk_kl": Preset(dppo_point("topk_kl", 0.05), "as dppo_kl, over the engine's likeliest tokens", "2602.04879"),
}
