"""Named methods: each is data, a point of the space that `config/schema.py` spans; torch-free.

`${...}` is resolved by the configuration. What a method asks of keys outside the algorithm section is in `elsewhere`.
"""

from __future__ import annotations

from moerl.algorithms.newer_presets import NEWER_PRESETS
from moerl.algorithms.peer_presets import PEER_PRESETS
from moerl.algorithms.preset_points import (
    BUDGET,
    GROUP,
    GROUP_MEAN,
    KL_REWARD,
    RAW_REWARD,
    REFILL_ROUNDS,
    SEQ_MEAN,
    SEQ_SUM,
    SOFT_OVERLONG,
    TOKEN_MEAN,
    VALUE,
    ZERO_VARIANCE,
    Preset,
    dppo_point,
    gmpo_point,
    gspo_point,
    kl_point,
    ppo_point,
    score_point,
    shift_point,
)
from moerl.algorithms.token_presets import TOKEN_PRESETS

PRESETS: dict[str, Preset] = {
    "sft": Preset(
        score_point(RAW_REWARD, TOKEN_MEAN, {"name": "none"}, level="none"),
        "supervised training: mean negative logprob of the file's own completions (every advantage is 1)",
        "-",
        {"rollout.engine.name": "dataset"},
    ),
    "reinforce": Preset(
        score_point(RAW_REWARD, SEQ_SUM, {"name": "none"}, level="none"),
        "the plain score-function gradient, no baseline",
        "-",
    ),
    "grpo": Preset(
        ppo_point(GROUP, SEQ_MEAN, kl=kl_point(0.04)),
        "group-normalised rewards, token clip, KL to the reference in the loss",
        "2402.03300",
    ),
    "two_grpo": Preset(
        ppo_point({**GROUP, "std_ddof": 0}, SEQ_MEAN),
        "GRPO with two answers a prompt",
        "2510.00977",
        {"rollout.group_size": 2},
    ),
    "dr_grpo": Preset(ppo_point(GROUP_MEAN, BUDGET), "GRPO without the std and with a constant length", "2503.20783"),
    "dr_grpo_batch_norm": Preset(
        ppo_point({"center": "batch_mean", "scale": "batch_std_raw"}, SEQ_MEAN),
        "what one survey describes as Dr. GRPO",
        "survey",
    ),
    "dapo": Preset(
        ppo_point(
            GROUP,
            TOKEN_MEAN,
            0.2,
            0.28,
            filters=[{"name": "overlong"}, ZERO_VARIANCE],
            shaping=[SOFT_OVERLONG],
            refill_rounds=REFILL_ROUNDS,
        ),
        "clip-higher, token mean, groups without spread sampled anew, overlong answers masked and punished softly",
        "2503.14476",
        {"rollout.group_size": 16},
    ),
    "clip_dapo": Preset(
        ppo_point(GROUP, TOKEN_MEAN, filters=[ZERO_VARIANCE]),
        "a survey's DAPO: symmetric clip, no overlong treatment",
        "survey",
    ),
    "dapo_unclipped": Preset(
        {**ppo_point(GROUP, TOKEN_MEAN, filters=[ZERO_VARIANCE]), "trust": {"name": "none"}},
        "a survey's DAPO without any clip",
        "survey",
    ),
    "gspo": Preset(
        gspo_point("seq_geo", 3e-4, 4e-4, SEQ_MEAN),
        "one geometric-mean ratio per sequence, clipped as a whole",
        "2507.18071",
    ),
    "gspo_token": Preset(
        gspo_point("seq_geo_token", 3e-4, 4e-4, SEQ_MEAN),
        "GSPO's ratio with an advantage that may differ per token",
        "2507.18071",
    ),
    "luspo": Preset(
        gspo_point("seq_geo", 2e-3, 2.5e-3, SEQ_SUM),
        "GSPO weighted by length, so that length is not punished",
        "2602.05261",
    ),
    "gmpo": Preset(gmpo_point(), "geometric mean of token ratios, each clipped in log space first", "2507.20673"),
    "rspo": Preset(
        gmpo_point(router_shift=shift_point("before_clip")),
        "GMPO with ratios shrunk by how far the routers moved",
        "2510.23027",
    ),
    "grpo_rs": Preset(
        ppo_point(GROUP, SEQ_MEAN, kl=kl_point(0.04), router_shift=shift_point("before_clip")),
        "GRPO with the router-shift factor",
        "2510.23027",
    ),
    "gspo_rs": Preset(
        gspo_point("seq_geo", 3e-4, 4e-4, SEQ_MEAN, router_shift=shift_point("before_clip")),
        "GSPO with the router-shift factor",
        "2510.23027",
    ),
    "gmpo_rs_v1": Preset(
        gmpo_point(router_shift=shift_point("after_clip")),
        "the first version of RSPO: the factor multiplies after the clip",
        "2510.23027v1",
    ),
    "cispo": Preset(
        score_point(
            GROUP,
            TOKEN_MEAN,
            {"name": "is_clip", "min": 0.0, "max": 5.0},
            filters=[ZERO_VARIANCE],
            shaping=[SOFT_OVERLONG],
        ),
        "importance weights are capped, no token loses its gradient (the cap is ScaleRL's: the paper gives none)",
        "2506.13585",
    ),
    "cispo_min_clip": Preset(
        ppo_point(
            {"center": "batch_mean", "scale": "batch_std_raw"}, TOKEN_MEAN, 0.2, 0.28, filters=[{"name": "overlong"}]
        ),
        "what one survey describes as CISPO: a clipped surrogate with batch-normalised advantages",
        "survey",
    ),
    "scalerl_loss": Preset(
        score_point(
            {"center": "group_mean", "scale": "batch_std_centered"},
            {"name": "prompt_mean"},
            {"name": "is_clip", "min": 0.0, "max": 5.0},
            anchor="rollout",
            filters=[ZERO_VARIANCE],
        ),
        "ScaleRL's objective alone: its retirement of solved prompts, fp32 head and asynchrony are not part of it",
        "2510.13786",
    ),
    "sapo": Preset(
        {**ppo_point(GROUP, SEQ_MEAN), "trust": {"name": "soft_gate", "tau_pos": 1.0, "tau_neg": 1.05}},
        "a sigmoid gate in place of the clip",
        "2511.20347",
    ),
    "vespo": Preset(
        score_point(
            GROUP,
            TOKEN_MEAN,
            {"name": "gamma_kernel", "k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0},
            level="seq_prod",
            anchor="rollout",
        ),
        "a kernel of the whole sequence's ratio to the rollout policy",
        "2602.10693",
    ),
    "dppo_tv": Preset(
        dppo_point("binary_tv", 0.15),
        "tokens too far from the rollout policy in total variation are dropped",
        "2602.04879",
    ),
    "dppo_kl": Preset(dppo_point("binary_kl", 0.05), "as dppo_tv, by KL", "2602.04879"),
    "minirl": Preset(
        score_point(GROUP_MEAN, SEQ_SUM, {"name": "ratio_mask", "lo": 0.2, "hi": 0.27, "cap": 5.0}, anchor="rollout"),
        "the baseline on which routing replay is measured; set algorithm.routing to R2 or R3",
        "2512.01374",
    ),
    "lite_ppo": Preset(
        ppo_point({"center": "group_mean", "scale": "batch_std_raw"}, TOKEN_MEAN),
        "group mean, batch std, token mean",
        "2508.08221",
    ),
    "olmo3": Preset(
        ppo_point(
            GROUP_MEAN,
            TOKEN_MEAN,
            0.2,
            0.272,
            correction={"name": "tis", "level": "token", "cap": 2.0},
            filters=[ZERO_VARIANCE],
            refill_rounds=REFILL_ROUNDS,
        ),
        "clip-higher with truncated importance weights and refilled batches",
        "2512.13961",
        {"rollout.group_size": 8, "rollout.prompts_per_step": 64},
    ),
    "icepop": Preset(
        ppo_point(GROUP, SEQ_MEAN, correction={"name": "icepop", "min": 0.5, "max": 5.0}),
        "tokens on which trainer and engine disagree too much are dropped",
        "2510.18855",
    ),
    "cisco": Preset(
        ppo_point(GROUP, SEQ_MEAN, kl=kl_point(0.04), correction={"name": "tis", "level": "token", "cap": 2.0}),
        "a survey's constrained importance sampling: GRPO with truncated weights to the data-collecting policy",
        "survey",
    ),
    "gopo": Preset(
        ppo_point({**RAW_REWARD, "transform": {"name": "rank", "range": 2.0}}, SEQ_MEAN, kl=kl_point(0.04)),
        "ranks within the group in place of rewards",
        "2602.03876",
    ),
    "gdpo": Preset(
        ppo_point({**GROUP, "transform": {"name": "decoupled", "batch_norm": True}}, SEQ_MEAN),
        "every reward component normalised in its group before they are summed",
        "2601.05242",
    ),
    "ppo": Preset(
        ppo_point(VALUE, TOKEN_MEAN, critic={"init": "policy"}, kl={**KL_REWARD, "coefficient": 0.01}),
        "a critic's GAE advantages, whitened over tokens, KL to the reference in the reward",
        "1707.06347",
    ),
    "vapo": Preset(
        ppo_point(
            {**VALUE, "gae_alpha": 0.05},
            TOKEN_MEAN,
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
        ppo_point({"center": "group_loo", "scale": "none"}, SEQ_MEAN, kl=kl_point(0.04)),
        "what one survey describes as REINFORCE++: leave-one-out advantages in GRPO's loss",
        "survey",
    ),
    "reinforce_rej": Preset(
        ppo_point(RAW_REWARD, SEQ_MEAN, filters=[ZERO_VARIANCE], shaping=[{"name": "signed"}]),
        "no baseline; prompts that are all right or all wrong are dropped",
        "2504.11343",
    ),
    "raft_pp": Preset(
        ppo_point(RAW_REWARD, SEQ_MEAN, filters=[{"name": "positives_only"}], shaping=[{"name": "signed"}]),
        "train on the right answers only",
        "2504.11343",
    ),
    **TOKEN_PRESETS,
    **NEWER_PRESETS,
    **PEER_PRESETS,
}
"""Methods by name; `<peer>/<method>` is a method with another framework's conventions."""
