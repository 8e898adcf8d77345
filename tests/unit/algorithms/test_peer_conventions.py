"""Where other frameworks compute something else: moerl's choice, and theirs where it is an option."""

from __future__ import annotations

import pytest
import torch

from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.registries import corrections
from moerl.algorithms.types import CreditInputs
from moerl.config.schema import AdvantageSection

CLIP = {"trust": {"name": "clip"}}
LIVE = torch.tensor([4, 2, 0, 1])
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def credit(advantage, rewards, groups=None):
    cfg = AdvantageSection(**advantage)
    rows = torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)
    groups = torch.zeros(len(rows), dtype=torch.int64) if groups is None else torch.tensor(groups)
    ones = torch.ones(1, dtype=torch.float64)
    shaping = torch.zeros(len(rows), dtype=torch.float64)
    return group_advantages(cfg, CreditInputs(rows, ones, groups, groups, ("p",) * len(rows), shaping))[0]


def test_cispo_weights_have_a_lower_bound_in_verl_and_slime_only(batch_v):
    far = batch_v.old - 2.0
    for name, bound in (("cispo", None), ("trl/cispo", None), ("verl/cispo", 0.8), ("slime/cispo", 0.8)):
        values = {**PRESETS[name].values, "filters": [], "shaping": []}
        gradient = batch_v.run(values, far)[1]
        advantages = batch_v.sequence_advantages[torch.repeat_interleave(torch.arange(4), batch_v.lengths)]
        weight = bound or float(torch.tensor(-2.0).exp())
        torch.testing.assert_close(gradient, -weight * advantages / 10)


def test_cispo_cap_is_absolute_by_default_and_one_plus_eps_in_verl(batch_v):
    far = batch_v.old + 4.0
    caps = {"cispo": 5.0, "trl/cispo": 5.0, "verl/cispo": 1.2, "slime/cispo": 1.2}
    for name, cap in caps.items():
        gradient = batch_v.run({**PRESETS[name].values, "filters": [], "shaping": []}, far)[1]
        assert float(gradient[0]) == pytest.approx(-cap / 10)


def test_dr_grpo_divides_by_answers_times_budget_and_may_divide_by_the_budget_alone(batch_v):
    per_sequence = {"name": "fixed_denominator", "tokens": 4}
    assert float(batch_v.run({**CLIP, "aggregation": per_sequence})[0]) == pytest.approx(-0.182705, abs=2e-6)
    alone = {**per_sequence, "per_sequence": False}
    assert float(batch_v.run({**CLIP, "aggregation": alone})[0]) == pytest.approx(-0.730820, abs=2e-6)


@pytest.mark.parametrize(("count_empty", "total"), [(False, 1.0), (True, 0.75)])
def test_answers_without_tokens_do_not_count_unless_they_are_told_to(count_empty, total):
    """A mean of ones over a batch of which one of four answers has no token."""
    for node in ({"name": "seq_mean_token_mean"}, {"name": "seq_mean_token_sum"}):
        weights = sequence_weights({**node, "count_empty": count_empty}, LIVE, ONE_GROUP)
        ones = LIVE if node["name"] == "seq_mean_token_mean" else (LIVE > 0).long()
        assert float((weights * ones).sum()) == pytest.approx(total)
        assert weights[2] == 0
    fixed = {"name": "fixed_denominator", "tokens": 1, "count_empty": count_empty}
    assert float(sequence_weights(fixed, LIVE, ONE_GROUP).sum()) == pytest.approx(total)
    assert PRESETS["trl/grpo"].values["aggregation"] == {"name": "seq_mean_token_mean", "count_empty": True}
    assert "count_empty" not in PRESETS["slime/grpo"].values["aggregation"]


def test_token_mean_masks_its_numerator(batch_v):
    """Advantages, logprobs and weights of padding are of no consequence (one peer relies on zeros there)."""
    loss = batch_v.run({**CLIP, "aggregation": {"name": "token_mean"}})[0]
    assert float(loss) == pytest.approx(-0.292328, abs=2e-6)


@pytest.mark.parametrize(
    ("preset", "ddof", "eps"),
    [("grpo", 0, 1e-6), ("trl/grpo", 1, 1e-4), ("verl/grpo", 1, 1e-6), ("slime/grpo", 1, 1e-6)],
)
def test_standard_deviations(preset, ddof, eps):
    rewards = torch.tensor([0.2, 0.9, 0.4, 0.9], dtype=torch.float64)
    wanted = (rewards - rewards.mean()) / (rewards.std(correction=ddof) + eps)
    torch.testing.assert_close(credit(PRESETS[preset].values["advantage"], rewards.tolist()), wanted)


@pytest.mark.parametrize(("preset", "wanted"), [("grpo", 0.0), ("trl/grpo", 0.0), ("verl/grpo", 0.7)])
def test_a_group_of_one(preset, wanted):
    assert float(credit(PRESETS[preset].values["advantage"], [0.7])) == pytest.approx(wanted)


def test_dual_clip_is_off_but_for_verl(batch_v):
    for name in ("grpo", "trl/grpo", "slime/grpo"):
        assert PRESETS[name].values["trust"].get("dual_c") is None
    far = batch_v.old + 3.0
    assert batch_v.run(PRESETS["verl/grpo"].values, far)[1][4] == 0
    assert batch_v.run(PRESETS["slime/grpo"].values, far)[1][4] > 0


def test_gspo_is_the_sequence_form_and_the_token_form_in_verl(batch_v):
    assert PRESETS["trl/gspo"].values["level"] == PRESETS["slime/gspo"].values["level"] == "seq_geo"
    assert PRESETS["verl/gspo"].values["level"] == "seq_geo_token"
    near = batch_v.old + 1e-5 * torch.arange(10, dtype=torch.float64)
    wide = {"name": "clip", "lo": 1e-2, "hi": 1e-2}
    same = [batch_v.run({**PRESETS[name].values, "trust": wide}, near)[1] for name in ("gspo", "verl/gspo")]
    torch.testing.assert_close(*same)


def test_a_configured_aggregation_is_respected_by_gspo_and_sapo(batch_v):
    for name in ("gspo", "sapo"):
        values = {**PRESETS[name].values, "trust": {"name": "none"}}
        mean, total = (
            batch_v.run({**values, "aggregation": {"name": node}})[1]
            for node in ("seq_mean_token_mean", "seq_mean_token_sum")
        )
        lengths = batch_v.lengths[torch.repeat_interleave(torch.arange(4), batch_v.lengths)]
        torch.testing.assert_close(total, mean * lengths)


def test_bounds_of_k1_rejection_act_on_train_over_rollout(batch_v):
    plugin, cfg = corrections.resolve(
        {"name": "rs", "stat": "token", "estimator": "k1", "min_ratio": 0.5, "max_ratio": 5.0}
    )
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    u = (batch_v.old - batch_v.rollout).exp()
    kept = plugin.target(x, cfg).keep
    assert torch.equal(kept, (u >= 0.5) & (u <= 5.0))
    assert not kept[5]  # u = 0.301
    assert kept[1]  # u = 2.46


def test_sequence_weights_are_the_product_and_geo_is_another_name(batch_v):
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    found = {}
    for level in ("seq", "geo"):
        plugin, cfg = corrections.resolve({"name": "tis", "level": level, "cap": 1e9})
        found[level] = plugin.target(x, cfg).weight[[0, 4, 6, 9]]
    wanted = {"seq": [2.435130, 0.292293, 1.116278, 1.349859], "geo": [1.249196, 0.540641, 1.037347, 1.349859]}
    for level, values in wanted.items():
        torch.testing.assert_close(found[level], torch.tensor(values, dtype=torch.float64), rtol=0, atol=1e-6)


def test_masked_importance_sampling_keeps_the_ratio_and_may_be_an_indicator(batch_v):
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    u = (batch_v.old - batch_v.rollout).exp()
    for weight, wanted in (("ratio", u), ("one", torch.ones_like(u))):
        plugin, cfg = corrections.resolve({"name": "mis", "weight": weight})
        torch.testing.assert_close(plugin.target(x, cfg).weight, wanted)


def test_the_token_weight_of_a_sequence_mask_is_capped(batch_v):
    plugin, cfg = corrections.resolve({"name": "seq_mask_tis", "cap": 1.5})
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    assert float(plugin.target(x, cfg).weight.max()) == 1.5


def test_batch_scaling_of_lite_ppo_is_raw_and_of_scalerl_centred():
    rewards, groups = [1, 0, 0, 1, 0.2, 0.9, 0.4, 0.9], [0, 0, 0, 0, 1, 1, 1, 1]
    raw = credit(PRESETS["lite_ppo"].values["advantage"], rewards, groups)
    centred = credit(PRESETS["scalerl"].values["advantage"], rewards, groups)
    assert float(raw[0]) == pytest.approx(1.195226, abs=2e-6)
    assert float(centred[0]) == pytest.approx(1.203856, abs=2e-6)
    baseline = credit(PRESETS["reinforce_pp_baseline"].values["advantage"], rewards, groups)
    torch.testing.assert_close(baseline, centred)


def test_gopo_breaks_no_ties_unless_it_is_told_to():
    advantage = PRESETS["gopo"].values["advantage"]
    assert credit(advantage, [1, 0, 0, 1]).tolist() == pytest.approx([4 / 3, -4 / 3, -4 / 3, 4 / 3])
    ordinal = {**advantage, "transform": {"name": "rank", "range": 2.0, "ties": "ordinal"}}
    assert credit(ordinal, [1, 0, 0, 1]).tolist() == pytest.approx([2, -2 / 3, -2, 2 / 3])


def test_k3_is_clamped_at_twenty_and_not_at_ten(batch_v):
    """A peer clamps the value of k3 to 10, beyond which its gradient vanishes."""
    values = {**CLIP, "aggregation": {"name": "token_mean"}, "kl": {"place": "loss", "coefficient": 1.0}}
    zero = torch.zeros(10, dtype=torch.float64)
    gradient = batch_v.run(values, batch_v.ref - 3.0, advantages=zero)[1]
    torch.testing.assert_close(gradient, (1 - torch.full((10,), 3.0, dtype=torch.float64).exp()) / 10)
