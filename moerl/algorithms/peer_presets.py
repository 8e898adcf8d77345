"""Methods as other frameworks compute them where that is another legitimate choice. Part of `presets.py`.

What differs: the standard deviation (ddof 1, other eps), a group of one, dual clip by default, bounds of CISPO's
weight, Dr. GRPO's divisor, whether answers without a live token count. Read from their loss functions in July and
August 2026.
"""

from __future__ import annotations

from moerl.algorithms.preset_points import (
    BUDGET,
    TOKEN_MEAN,
    Preset,
    Values,
    ppo_point,
    score_point,
)

_COUNTED = {"name": "seq_mean_token_mean", "count_empty": True}
_UNCOUNTED = {"name": "seq_mean_token_mean"}
_TRL = {"center": "group_mean", "scale": "group_std", "std_ddof": 1, "eps": 1e-4}
_VERL = {"center": "group_mean", "scale": "group_std", "std_ddof": 1, "eps": 1e-6, "singleton": "raw"}
_SLIME = {"center": "group_mean", "scale": "group_std", "std_ddof": 1, "eps": 1e-6}


def _centred(advantage: Values) -> Values:
    return {**advantage, "scale": "none"}


def _clip(lo: float, hi: float, dual_c: float | None = None) -> Values:
    return {"name": "clip", "lo": lo, "hi": hi, "dual_c": dual_c}


def _cispo(advantage: Values, low: float, high: float) -> Values:
    return score_point(advantage, TOKEN_MEAN, {"name": "is_clip", "min": low, "max": high})


def _gspo(advantage: Values, level: str, aggregation: Values) -> Values:
    return {**ppo_point(advantage, aggregation, 3e-4, 4e-4), "level": level}


PEER_PRESETS: dict[str, Preset] = {
    "trl/grpo": Preset(
        ppo_point(_TRL, _COUNTED), "GRPO in TRL: sample std with eps 1e-4, empty answers count, no KL", "TRL"
    ),
    "trl/dr_grpo": Preset(
        ppo_point(_centred(_TRL), {**BUDGET, "count_empty": True}),
        "Dr. GRPO in TRL: divided by the number of answers times the budget, empty answers count",
        "TRL",
    ),
    "trl/dapo": Preset(ppo_point(_TRL, TOKEN_MEAN, 0.2, 0.28), "DAPO's loss in TRL: mean over all tokens", "TRL"),
    "trl/gspo": Preset(_gspo(_TRL, "seq_geo", _COUNTED), "GSPO in TRL", "TRL"),
    "trl/cispo": Preset(_cispo(_TRL, 0.0, 5.0), "CISPO in TRL: the cap is absolute and there is no lower bound", "TRL"),
    "verl/grpo": Preset(
        {**ppo_point(_VERL, TOKEN_MEAN), "trust": _clip(0.2, 0.2, 3.0)},
        "GRPO in verl: mean over all tokens, dual clip 3, a group of one keeps its reward",
        "verl",
    ),
    "verl/dr_grpo": Preset(
        {**ppo_point(_centred(_VERL), BUDGET), "trust": _clip(0.2, 0.2, 3.0)},
        "Dr. GRPO in verl: divided by the number of answers with tokens times the padded length",
        "verl",
    ),
    "verl/gspo": Preset(
        _gspo(_VERL, "seq_geo_token", _UNCOUNTED), "GSPO in verl: always the token form and the sequence mean", "verl"
    ),
    "verl/cispo": Preset(
        _cispo(_VERL, 0.8, 1.2), "CISPO in verl: the weight is held within 1 - 0.2 and 1 + 0.2", "verl"
    ),
    "slime/grpo": Preset(ppo_point(_SLIME, _UNCOUNTED), "GRPO in slime: mean over answers, no dual clip", "slime"),
    "slime/gspo": Preset(_gspo(_SLIME, "seq_geo", _UNCOUNTED), "GSPO in slime", "slime"),
    "slime/cispo": Preset(
        _cispo(_SLIME, 0.8, 1.2), "CISPO in slime: the weight is held within 1 - 0.2 and 1 + 0.2", "slime"
    ),
}
