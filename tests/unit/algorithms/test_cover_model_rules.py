"""Which values of critic, reference, teacher and GAE are refused, with every reason; what is only warned of."""

from __future__ import annotations

import math

import pytest

from moerl.algorithms.axes import Axes
from moerl.algorithms.compose import composition_errors, composition_warnings, value_errors
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.unread import SWITCHES, unread_settings

VALUE = {"center": "value", "scale": "none"}
CRITIC = {"init": "policy"}
TEACHER = {"path": "teacher", "place": "reward", "coefficient": 1.0}
PAIRS = {
    "objective": {"name": "group_dpo"},
    "advantage": {"transform": {"name": "best_worst"}},
    "aggregation": {"name": "prompt_mean"},
}

FAULTS = {
    "values of nobody": (
        {"advantage": VALUE},
        "algorithm.advantage.center is 'value' with algorithm.critic.init 'none'",
    ),
    "a critic that nobody asks": (
        {"critic": CRITIC},
        "critic.init is 'policy' with algorithm.advantage.center",
    ),
    "a lambda of no values": ({"advantage": {"gae_alpha": 0.05}}, "gae_alpha is 0.05 with algorithm.advantage.center"),
    "scaled rewards under GAE": (
        {"advantage": {"center": "value", "scale": "group_std"}, "critic": CRITIC},
        "center is 'value' with algorithm.advantage.scale 'group_std'",
    ),
    "transformed rewards under GAE": (
        {"advantage": {**VALUE, "transform": {"name": "rank"}}, "critic": CRITIC},
        "and transform 'rank'",
    ),
    "GAE under one ratio": (
        {"advantage": VALUE, "critic": CRITIC, "level": "seq_geo"},
        "center is 'value' with algorithm.level 'seq_geo'",
    ),
    "a teacher's reward under one ratio": (
        {"teacher": TEACHER, "level": "seq_geo"},
        "teacher.place is 'reward' with algorithm.level 'seq_geo'",
    ),
    "a teacher's reward for pairs": (
        {**PAIRS, "teacher": TEACHER},
        "teacher.place is 'reward' with algorithm.objective 'group_dpo'",
    ),
    "a reference that nobody reads": (
        {"reference": {"update_every_steps": 5}},
        "reference.update_every_steps is 5, but nothing reads",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_model_that_does_not_fit_is_refused_once(name):
    values, words = FAULTS[name]
    (error,) = composition_errors(values)
    assert words in error


@pytest.mark.parametrize(
    "values",
    [
        {"advantage": {**VALUE, "gae_alpha": 0.05}, "critic": CRITIC},
        {"teacher": TEACHER},
        {"teacher": {**TEACHER, "place": "kl"}, "level": "seq_geo"},
        {"reference": {"update_every_steps": 5}, "kl": {"place": "loss", "estimator": "k3", "coefficient": 0.1}},
        {"reference": {"update_every_steps": 5}, "token_weight": {"name": "one_minus_ref_prob"}},
        {**PAIRS, "reference": {"update_every_steps": 5}},
    ],
)
def test_a_model_that_fits_is_not(values):
    assert composition_errors(values) == []


BOUNDS = {
    "advantage.gae_lambda": (1.5, "in [0, 1]"),
    "critic.gae_lambda": (-0.1, "in [0, 1]"),
    "advantage.gamma": (0.0, "in (0, 1]"),
    "reference.ema": (1.0, "in [0, 1): 1 would never move it"),
    "advantage.gae_alpha": (0.0, "a finite number above 0, or null"),
    "critic.value_clip": (math.inf, "a finite number above 0, or null"),
    "critic.lr": (-1e-6, "a finite number of at least 0"),
    "critic.warmup_steps": (-1, "a finite number of at least 0"),
    "critic.clip_grad_norm": (math.nan, "a finite number of at least 0"),
    "critic.pretrain_steps": (-1, "a finite number of at least 0"),
    "reference.update_every_steps": (-1, "a finite number of at least 0"),
    "teacher.coefficient": (-0.5, "a finite number of at least 0"),
    "kl.target": (0.0, "a finite number above 0, or null"),
    "entropy.target": (math.inf, "a finite number above 0, or null"),
    "positive_nll.threshold": (math.inf, "finite"),
    "router_shift.gamma_min": (1.5, "in (0, 1]"),
}


@pytest.mark.parametrize("path", BOUNDS)
def test_a_number_out_of_bounds_says_its_bounds(path):
    value, allowed = BOUNDS[path]
    section, key = path.split(".")
    assert value_errors({section: {key: value}}) == [f"algorithm.{path} is {value!r}, but must be {allowed}"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("advantage.gae_lambda", 0.0),
        ("advantage.gae_lambda", 1.0),
        ("advantage.gamma", 1.0),
        ("reference.ema", 0.0),
        ("router_shift.gamma_min", 1.0),
        ("teacher.coefficient", 0.0),
    ],
)
def test_a_bound_that_belongs_to_the_range_is_legal(path, value):
    section, key = path.split(".")
    assert value_errors({section: {key: value}}) == []


@pytest.mark.parametrize(
    ("values", "warnings"),
    [
        (
            {"kl": {"place": "loss", "coefficient": 0.0}},
            ["algorithm.kl.place is 'loss' with algorithm.kl.coefficient 0: the reference pass has no effect"],
        ),
        (
            {"entropy": {"coefficient": 0.01}},
            [
                "algorithm.entropy.coefficient is 0.01 with algorithm.entropy.place 'none': it has no effect; set "
                "algorithm.entropy.place to 'loss'"
            ],
        ),
        ({"kl": {"place": "loss", "coefficient": 0.1}}, []),
        ({"level": "seq_geo", "trust": {"name": "clip", "lo": 0.05, "hi": 0.05}}, []),
    ],
)
def test_what_has_no_effect_is_warned_of(values, warnings):
    assert composition_warnings(values) == warnings


MOVED = {
    "advantage.gae_lambda": 0.5,
    "kl.importance": True,
    "kl.straight_through": True,
    "kl.force": True,
    "entropy.step": 0.1,
    "positive_nll.threshold": 0.5,
    "router_shift.stage": "after_clip",
    "router_shift.gamma_min": 0.5,
    "critic.lr": 1e-3,
    "critic.warmup_steps": 3,
    "critic.clip_grad_norm": 0.5,
    "critic.value_clip": None,
    "critic.gae_lambda": 0.9,
    "critic.pretrain_steps": 2,
    "reference.ema": 0.5,
    "teacher.place": "kl",
    "teacher.coefficient": 0.5,
    "refill_rounds": 2,
    **{f"term_aggregation.{term}": {"name": "prompt_mean"} for term in ("kl", "entropy", "value", "nll")},
}
ON = {
    "advantage": {"center": "value"},
    "kl": {"place": "loss", "coefficient": 0.1},
    "entropy": {"place": "loss", "coefficient": 0.1},
    "positive_nll": {"coefficient": 0.1},
    "router_shift": {"enabled": True},
    "critic": {"init": "policy"},
    "reference": {"update_every_steps": 1},
    "teacher": {"path": "somewhere"},
    "filters": [{"name": "zero_variance"}],
}


def nested(path, value, onto=None):
    """`{"kl": {"target": value}}`, with what else is in `onto`."""
    head, _, rest = path.partition(".")
    onto = dict(onto or {})
    onto[head] = nested(rest, value, onto.get(head)) if rest else value
    return onto


def test_every_setting_that_a_switch_turns_off_is_tried():
    assert {path for _, _, paths in SWITCHES for path in paths} == set(MOVED)


@pytest.mark.parametrize("path", MOVED)
def test_a_setting_that_nothing_reads_is_told(path):
    (warning,) = composition_warnings(nested(path, MOVED[path]))
    assert warning.startswith(f"algorithm.{path} is set, but has no effect: algorithm.")
    assert composition_warnings(nested(path, MOVED[path], ON)) == []


@pytest.mark.parametrize("path", ["kl.importance", "kl.straight_through", "kl.force", "term_aggregation.kl"])
def test_a_kl_in_the_reward_is_no_term_of_the_loss(path):
    in_reward = {**ON, "kl": {"place": "reward", "coefficient": 0.1}}
    (warning,) = composition_warnings(nested(path, MOVED[path], in_reward))
    assert warning.endswith("has no effect: algorithm.kl.place is 'reward'")


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_has_a_setting_without_effect(name):
    assert list(unread_settings(Axes(PRESETS[name].values))) == []
