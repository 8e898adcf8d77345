"""The numbers that a method has when nothing is said, and the numbers that it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from moerl.algorithms.registries import (
    advantage_posts,
    advantage_transforms,
    corrections,
    objectives,
    schedules,
    token_weights,
    trust_regions,
)
from moerl.errors import ConfigError

KEPT = {"rejected": "keep_denominator"}
WEIGHS = {**KEPT, "batch_normalize": False}
DEFAULTS = [
    (trust_regions, "clip", {"lo": 0.2, "hi": 0.2, "dual_c": None, "delta": None}),
    (
        trust_regions,
        "div_mask",
        {"kind": "binary_tv", "delta": 0.15, "cap": 10.0, "one_sided": True, "token_rank": 0},
    ),
    (trust_regions, "dyn_clip", {"lo": 0.16, "hi": 0.2, "max": 10.0, "dual_c": 10.0}),
    (trust_regions, "gamma_kernel", {"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0}),
    (trust_regions, "is_clip", {"min": 0.0, "max": 5.0, "mask": False}),
    (trust_regions, "log_clip", {"lo": 0.4, "hi": 0.4}),
    (trust_regions, "ratio_mask", {"lo": 0.2, "hi": 0.27, "cap": 5.0}),
    (trust_regions, "soft_gate", {"tau_pos": 1.0, "tau_neg": 1.05, "form": "two_sided"}),
    (corrections, "icepop", {**WEIGHS, "min": 0.5, "max": 5.0}),
    (corrections, "mis", {**WEIGHS, "level": "token", "min": 0.0, "max": 2.0, "weight": "ratio"}),
    (corrections, "opsm", {**KEPT, "delta": 0.5}),
    (
        corrections,
        "rs",
        {
            **KEPT,
            "stat": "seq_mean",
            "estimator": "k3",
            "policy": "old",
            "threshold": 0.05,
            "min_ratio": 0.5,
            "max_ratio": 2.0,
        },
    ),
    (corrections, "seq_mask_tis", {**WEIGHS, "w_reduce": "none", "cap": 2.0, "min": 0.5, "max": 2.0}),
    (corrections, "tis", {**WEIGHS, "w_reduce": "none", "level": "token", "cap": 2.0}),
    (corrections, "vaco", {**KEPT, "bound": 0.1}),
    (token_weights, "prob_reweight", {"alpha": 0.3}),
    (token_weights, "top_entropy", {"q": 0.2}),
    (schedules, "lopti", {"eta": 0.5}),
    (objectives, "group_dpo", {"beta": 0.1, "length_norm": False}),
    (advantage_posts, "clamp", {"limit": 5.0}),
    (advantage_posts, "whiten_tokens", {"ddof": 0, "eps": 1e-8}),
    (advantage_transforms, "rank", {"range": 2.0, "ties": "average"}),
    (advantage_transforms, "decoupled", {"weights": [], "batch_norm": True}),
]


@pytest.mark.parametrize(("registry", "name", "numbers"), DEFAULTS, ids=[name for _, name, _ in DEFAULTS])
def test_defaults(registry, name, numbers):
    assert dataclasses.asdict(registry.resolve({"name": name})[1]) == numbers


REFUSED = [
    (trust_regions, {"name": "div_mask", "cap": 1.0}, r"trust.cap is 1.0; set it above 1"),
    (trust_regions, {"name": "div_mask", "delta": -0.5}, r"trust.delta is -0.5"),
    (trust_regions, {"name": "div_mask", "token_rank": -1}, r"trust.token_rank is -1"),
    (trust_regions, {"name": "dyn_clip", "max": 1.0}, r"trust.max is 1.0; set it above 1"),
    (trust_regions, {"name": "dyn_clip", "dual_c": 1.0}, r"trust.dual_c is 1.0; set it above 1"),
    (trust_regions, {"name": "ratio_mask", "cap": 1.0}, r"trust.cap is 1.0; set it above 1"),
    (trust_regions, {"name": "is_clip", "max": 0.5}, r"trust.max is 0.5"),
    (trust_regions, {"name": "is_clip", "min": -0.1}, r"trust.min is -0.1; set it between 0 and 1"),
    (trust_regions, {"name": "log_clip", "hi": -0.1}, r"trust.hi is -0.1"),
    (trust_regions, {"name": "soft_gate", "tau_pos": 0.0}, r"trust.tau_pos is 0.0; set it above 0"),
    (trust_regions, {"name": "gamma_kernel", "k_pos": 0.0}, r"trust.k_pos is 0.0; set it above 0"),
    (corrections, {"name": "icepop", "min": 5.0}, r"correction.max is 5.0; set it above 5"),
    (corrections, {"name": "rs", "max_ratio": 1.0}, r"correction.max_ratio is 1.0; set it above 1"),
    (corrections, {"name": "tis", "cap": 0.0}, r"correction.cap is 0.0; set it above 0"),
    (corrections, {"name": "seq_mask_tis", "cap": 0.0}, r"correction.cap is 0.0; set it above 0"),
    (token_weights, {"name": "top_entropy", "q": 0.0}, r"token_weight.q is 0.0; set it above 0"),
    (schedules, {"name": "lopti", "eta": 1.5}, r"schedule.eta is 1.5; set it between 0 and 1"),
    (advantage_posts, {"name": "clamp", "limit": 0.0}, r"post.limit is 0.0; set it above 0"),
]


@pytest.mark.parametrize(("registry", "node", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_a_number_out_of_range_is_refused_with_its_range(registry, node, message):
    with pytest.raises(ConfigError, match=message):
        registry.resolve(node)


@pytest.mark.parametrize(
    ("registry", "node"),
    [
        (trust_regions, {"name": "div_mask", "cap": 1.5, "delta": 0.0}),
        (trust_regions, {"name": "ratio_mask", "cap": 1.5}),
        (trust_regions, {"name": "dyn_clip", "max": 1.5, "dual_c": 1.5}),
        (trust_regions, {"name": "is_clip", "max": 1.0, "min": 1.0}),
        (corrections, {"name": "rs", "max_ratio": 1.5, "min_ratio": 1.0}),
        (token_weights, {"name": "top_entropy", "q": 1.0}),
        (schedules, {"name": "lopti", "eta": 1.0}),
    ],
)
def test_a_number_at_the_end_of_its_range_is_legal(registry, node):
    cfg = registry.resolve(node)[1]
    assert {name: getattr(cfg, name) for name in node if name != "name"} == {
        name: value for name, value in node.items() if name != "name"
    }
