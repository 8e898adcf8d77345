"""Methods of late 2025 and 2026 around the mismatch of policies. Part of `presets.py`."""

from __future__ import annotations

from moerl.algorithms.preset_points import GROUP, SEQ_MEAN, Preset, ppo_point, score_point

TRM = {"name": "rs", "stat": "seq_max", "estimator": "k3", "threshold": 0.05, "policy": "current"}

NEWER_PRESETS: dict[str, Preset] = {
    "ctpo": Preset(
        {
            **ppo_point(GROUP, SEQ_MEAN),
            "level": "prefix_prod",
            "trust": {"name": "position_clip", "lo": 0.025, "hi": 0.05, "power": 0.5},
        },
        "a token's ratio is the product up to it, clipped in log space within bounds that grow as its position's root",
        "2605.07331",
    ),
    "minpro": Preset(
        score_point(GROUP, {"name": "prompt_mean"}, {"name": "is_clip", "min": 0.0, "max": 5.0}, level="prefix_min"),
        "capped weights of a token's ratio times the smallest before it (the cap is CISPO's: no account gives one)",
        "2601.22718",
    ),
    "trm": Preset(
        ppo_point(GROUP, SEQ_MEAN, correction=TRM),
        "answers with a token too far from the rollout policy are dropped whole (the bound is moerl's)",
        "2512.23075",
    ),
    "vaco": Preset(
        ppo_point(GROUP, SEQ_MEAN, correction={"name": "vaco", "bound": 0.1}),
        "in answers far from the rollout policy, tokens that would move further are dropped (the bound is moerl's)",
        "2603.01365",
    ),
}
