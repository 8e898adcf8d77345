"""Which axes go together, what the presets are, and that both can be asked without torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from moerl.algorithms.compose import composition_errors, composition_warnings, value_errors
from moerl.algorithms.objective import build_objective
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.registries import (
    advantage_posts,
    advantage_transforms,
    aggregations,
    corrections,
    filters,
    shapings,
    trust_regions,
)
from moerl.config.schema import AlgorithmSection
from moerl.errors import ConfigError

GMPO = {"level": "geo_clip", "trust": {"name": "log_clip"}}

FAULTS = {
    "score with clip": ({"form": "score"}, ("form is 'score'", "trust 'clip'", "none")),
    "ratio with is_clip": ({"trust": {"name": "is_clip"}}, ("form is 'ratio'", "trust 'is_clip'", "'score'")),
    "a bare plugin name": ({"trust": "is_clip"}, ("form is 'ratio'", "trust 'is_clip'")),
    "no ratio, ratio form": ({"level": "none", "trust": {"name": "none"}}, ("level is 'none'", "form 'ratio'")),
    "no ratio to bound": (
        {"level": "none", "form": "score", "trust": {"name": "is_clip"}},
        ("level is 'none'", "'is_clip'"),
    ),
    "geo_clip without log_clip": ({"level": "geo_clip"}, ("level is 'geo_clip'", "trust 'clip'", "log_clip")),
    "log_clip elsewhere": ({"trust": {"name": "log_clip"}}, ("trust 'log_clip'", "level 'geo_clip'", "'token'")),
    "kernel of tokens": ({"form": "score", "trust": {"name": "gamma_kernel"}}, ("'gamma_kernel'", "'seq_prod'")),
    "rollout anchor with tis": (
        {"anchor": "rollout", "correction": {"name": "tis"}},
        ("anchor is 'rollout'", "correction 'tis'"),
    ),
    "rollout anchor with mis": (
        {"anchor": "rollout", "correction": {"name": "mis"}},
        ("anchor is 'rollout'", "correction 'mis'"),
    ),
    "dppo on the old policy": ({"form": "score", "trust": {"name": "div_mask"}}, ("'div_mask'", "anchor is 'old'")),
    "token advantages, sequence ratio": (
        {"level": "seq_geo", "advantage": {"post": {"name": "whiten_tokens"}}},
        ("level is 'seq_geo'", "post 'whiten_tokens'", "seq_geo_token"),
    ),
    "after_clip elsewhere": (
        {"level": "seq_geo", "router_shift": {"enabled": True, "stage": "after_clip"}},
        ("stage is 'after_clip'", "level 'seq_geo'"),
    ),
    "router shift without a ratio": (
        {"level": "none", "form": "score", "trust": {"name": "none"}, "router_shift": {"enabled": True}},
        ("router_shift.enabled", "level 'none'"),
    ),
    "k1 in the loss": (
        {"kl": {"place": "loss", "estimator": "k1", "coefficient": 0.1}},
        ("estimator is 'k1'", "place 'loss'"),
    ),
    "two ways to mend the kl": (
        {"kl": {"place": "loss", "importance": True, "straight_through": True}},
        ("importance", "straight_through"),
    ),
    "token weights in a geometric mean": (GMPO | {"correction": {"name": "tis"}}, ("'geo_clip'", "'tis'", "w_reduce")),
    "one weight of an answer in VESPO's kernel": (
        {"form": "score", "level": "seq_prod", "trust": {"name": "gamma_kernel"}}
        | {"correction": {"name": "tis", "level": "seq"}},
        ("'gamma_kernel'", "'tis' of level 'seq'", "correction.level to token"),
    ),
    "icepop in a geometric mean": (GMPO | {"correction": {"name": "icepop"}}, ("'geo_clip'", "'icepop'", "mis")),
}

REMOVE = {"rejected": "remove"}
PAIRS = {
    "objective": {"name": "group_dpo"},
    "advantage": {"transform": {"name": "best_worst"}},
    "aggregation": {"name": "prompt_mean"},
}
KL_REWARD = {"place": "reward", "estimator": "k1", "coefficient": 0.1}
PLAIN = {"center": "none", "scale": "none"}

FAULTS |= {
    "removal by the current policy": (
        {"correction": {"name": "opsm", **REMOVE}},
        ("rejected is 'remove'", "'opsm'", "keep_denominator"),
    ),
    "removal by what it removes": ({"correction": {"name": "vaco", **REMOVE}}, ("rejected is 'remove'", "'vaco'")),
    "removal with a mask of the current policy": (
        {"form": "score", "anchor": "rollout", "trust": {"name": "div_mask"}, "correction": {"name": "rs", **REMOVE}},
        ("rejected is 'remove'", "'div_mask'"),
    ),
    "k3 in the reward": ({"kl": {**KL_REWARD, "estimator": "k3"}}, ("place is 'reward'", "estimator 'k3'", "'k1'")),
    "a discount without values": ({"advantage": {"gamma": 0.9}}, ("gamma is 0.9", "center 'group_mean'")),
    "the KL as a component of its own": (
        {"advantage": {"transform": {"name": "decoupled"}}, "kl": KL_REWARD},
        ("kl.place is 'reward'", "transform 'decoupled'", "'loss'"),
    ),
    "a gradient of the reward": ({"kl": {**KL_REWARD, "importance": True}}, ("place is 'reward'", "kl.importance")),
    "a target without a KL": ({"kl": {"target": 0.1}}, ("kl.target", "kl.place 'none'")),
    "a target without a bonus": ({"entropy": {"target": 0.1}}, ("entropy.target", "entropy.place 'none'")),
    "token rewards, sequence ratio": (
        {"level": "seq_geo", "advantage": PLAIN, "kl": KL_REWARD},
        ("level is 'seq_geo'", "kl.place 'reward'", "seq_geo_token"),
    ),
    "token entropies, sequence ratio": (
        {"level": "seq_geo", "entropy": {"place": "reward", "coefficient": 0.1}},
        ("level is 'seq_geo'", "entropy.place 'reward'"),
    ),
    "a history without its transform": ({"advantage": {"center": "history"}}, ("'history'", "'identity'", "'sas'")),
    "a transform without its history": ({"advantage": {"transform": {"name": "sas"}}}, ("'group_mean'", "'sas'")),
    "a history that counts twice": (
        {"advantage": {"center": "history", "transform": {"name": "sas"}}, "kl": KL_REWARD},
        ("'sas'", "kl.place 'reward'", "twice"),
    ),
    "token weights of a geometric mean": (GMPO | {"token_weight": {"name": "prob_reweight"}}, ("'geo_clip'", "to one")),
    "lopti over sequences": ({"level": "seq_geo", "schedule": {"name": "lopti"}}, ("'lopti'", "level 'seq_geo'")),
    "lopti with a sequence correction": (
        {"schedule": {"name": "lopti"}, "correction": {"name": "tis", "level": "seq"}},
        ("'lopti'", "correction 'tis'"),
    ),
    "pairs of no transform": (
        {**PAIRS, "advantage": {}},
        ("'group_dpo'", "advantage.transform 'identity'", "best_worst"),
    ),
    "pairs under a token mean": (
        {**PAIRS, "aggregation": {"name": "token_mean"}},
        ("'group_dpo'", "aggregation 'token_mean'", "prompt_mean"),
    ),
    "pairs in two updates": ({**PAIRS, "schedule": {"name": "lopti"}}, ("'group_dpo'", "schedule 'lopti'")),
    "pairs with a correction": ({**PAIRS, "correction": {"name": "tis"}}, ("'group_dpo'", "correction 'tis'")),
    "pairs chosen before their rewards": ({**PAIRS, "kl": KL_REWARD}, ("'group_dpo'", "in the reward")),
    "pairs of clamped advantages": (
        {**PAIRS, "advantage": {"transform": {"name": "best_worst"}, "post": {"name": "clamp"}}},
        ("'group_dpo'", "post 'clamp'"),
    ),
}

LEGAL = {
    "pairs": PAIRS,
    "removal of what the score pass rejects": {"correction": {"name": "icepop", **REMOVE}},
    "kl of whole answers, sequence ratio": {"level": "seq_geo", "kl": KL_REWARD},
    "kl of tokens, token ratio": {"advantage": PLAIN, "kl": KL_REWARD},
    "lopti with a token correction": {"schedule": {"name": "lopti"}, "correction": {"name": "tis"}},
    "token weights of a sequence ratio": {"level": "seq_geo", "token_weight": {"name": "top_entropy"}},
    "schema defaults": {},
    "one weight per sequence": GMPO | {"correction": {"name": "tis", "level": "seq"}},
    "reduced weights": GMPO | {"correction": {"name": "tis", "w_reduce": "geo_mean"}},
    "rejection on the rollout anchor": {"anchor": "rollout", "correction": {"name": "rs"}},
    "k1 with importance": {"kl": {"place": "loss", "estimator": "k1", "importance": True}},
    "v1 router shift": GMPO | {"router_shift": {"enabled": True, "stage": "after_clip"}},
    "a plugin from elsewhere": {"form": "score", "trust": {"name": "package.module:mine"}},
    "token advantages, token gradients": {"level": "seq_geo_token", "advantage": {"post": {"name": "whiten_tokens"}}},
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_once_with_both_fields(name):
    values, words = FAULTS[name]
    errors = composition_errors(values)
    assert len(errors) == 1
    assert all(word in errors[0] for word in words)
    assert errors[0].startswith("algorithm.")


@pytest.mark.parametrize("name", LEGAL)
def test_legal_compositions(name):
    assert composition_errors(LEGAL[name]) == []


def test_all_faults_are_reported_together():
    values = {
        "anchor": "rollout",
        "form": "score",
        "correction": {"name": "tis"},
        "kl": {"place": "loss", "estimator": "k1"},
    }
    assert len(composition_errors(values)) == 3


def test_unknown_values_say_what_is_allowed():
    errors = value_errors({"level": "sequence", "advantage": {"std_ddof": 2}, "router_shift": {"gamma_min": 0.0}})
    assert len(errors) == 3
    assert "algorithm.level is 'sequence', but must be one of none, token, seq_geo" in errors[0]
    assert value_errors({}) == []


def test_wide_bounds_with_gspo_are_warned_of():
    wide = {"level": "seq_geo", "trust": {"name": "clip", "lo": 0.2, "hi": 4e-4}}
    (warning,) = composition_warnings(wide)
    assert "algorithm.trust.lo is 0.2" in warning
    assert composition_errors(wide) == []
    assert "no effect" in composition_warnings({"kl": {"coefficient": 0.1}})[0]


@pytest.mark.parametrize("name", ["rank", "best_worst"])
def test_what_a_ranking_does_not_read_is_warned_of(name):
    (warning,) = composition_warnings({"advantage": {"transform": {"name": name}}})
    assert f"transform {name!r}" in warning
    assert "'group_mean', 'group_std' have no effect" in warning
    plain = {"advantage": {"center": "none", "scale": "none", "transform": {"name": name}}}
    assert composition_warnings(plain) == []


def test_an_anchor_without_a_ratio_is_warned_of():
    (warning,) = composition_warnings(
        {"level": "none", "form": "score", "trust": {"name": "none"}, "anchor": "rollout"}
    )
    assert "anchor is 'rollout' with algorithm.level 'none'" in warning


def test_build_objective_refuses_with_every_reason():
    section = AlgorithmSection(form="score", anchor="rollout", correction={"name": "tis"})
    with pytest.raises(ConfigError) as caught:
        build_objective(section)
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize(
    ("trust", "words"),
    [
        ({"name": "clip", "lo": -0.1}, "trust.lo is -0.1"),
        ({"name": "clip", "dual_c": 0.5}, "trust.dual_c is 0.5"),
        ({"name": "clip", "lo": float("nan")}, "trust.lo is nan"),
        ({"name": "clip", "high": 0.3}, "unknown key 'high'"),
        ({"name": "clip", "lo": "wide"}, "wide"),
        ({"name": "clp"}, "did you mean 'clip'"),
    ],
)
def test_wrong_arguments_of_a_trust_region(trust, words):
    with pytest.raises(ConfigError, match=words):
        build_objective(AlgorithmSection(trust=trust))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_is_complete_legal_and_known_to_the_schema(batch_v, name):
    preset = PRESETS[name]
    assert preset.summary
    assert preset.paper
    assert composition_errors(preset.values) == []
    assert composition_warnings(preset.values) == []
    assert set(preset.values) <= {field.name for field in dataclasses.fields(AlgorithmSection)}
    values = batch_v.resolved(preset.values)
    trust_regions.resolve(values["trust"])
    aggregations.resolve(values["aggregation"])
    corrections.resolve(values.get("correction", {"name": "none"}))
    advantage_transforms.resolve(values["advantage"].get("transform", {"name": "identity"}))
    advantage_posts.resolve(values["advantage"].get("post", {"name": "none"}))
    for node in values.get("filters", []):
        filters.resolve(node)
    for node in values.get("shaping", []):
        shapings.resolve(node)


def test_the_presets_that_recipes_name_are_there():
    assert {"gspo", "grpo", "dapo", "gmpo", "cispo", "rspo", "sft"} <= set(PRESETS)


NEEDS = {
    "gspo": {"old_logprobs"},
    "grpo": {"old_logprobs", "ref_logprobs"},
    "dapo": {"old_logprobs"},
    "gmpo": {"old_logprobs"},
    "cispo": {"old_logprobs"},
    "rspo": {"old_logprobs", "router_shift"},
    "sft": set(),
    "reinforce": set(),
    "vespo": set(),
    "dppo_tv": set(),
    "minirl": {"old_logprobs"},
    "olmo3": {"old_logprobs"},
    "rloo": set(),
    "reinforce_pp": {"old_logprobs"},
    "reinforce_pp_baseline": {"old_logprobs", "ref_logprobs"},
    "dcpo": {"old_logprobs"},
    "ar_lopti": {"old_logprobs", "ref_logprobs"},
    "group_dpo": {"ref_logprobs", "group_ids"},
    "dr_grpo_ref_weighted": {"old_logprobs", "ref_logprobs"},
    "scalerl": set(),
}


@pytest.mark.parametrize("name", NEEDS)
def test_objective_declares_what_it_reads(batch_v, name):
    objective = batch_v.objective(PRESETS[name].values)
    assert objective.needs == NEEDS[name]
    assert objective.constant_advantage == (name in {"gspo", "gmpo", "rspo", "vespo"})
    assert objective.reads_rollout_logprobs == (name in {"vespo", "dppo_tv", "minirl", "olmo3", "scalerl"})


def test_presets_and_rules_import_without_torch():
    code = (
        "import sys; from moerl.algorithms.presets import PRESETS; "
        "from moerl.algorithms.compose import composition_errors; "
        "assert not any(composition_errors(p.values) for p in PRESETS.values()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
