"""Routing drift, expert load and train/rollout mismatch: hand-checked numbers, and what must not change them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from moerl.algorithms.route_metrics import (
    LoadTracker,
    expert_counts,
    gamma_metrics,
    load_metrics,
    load_of_counts,
    mismatch_metrics,
    route_metrics,
    router_shift_gamma,
)
from moerl.errors import CheckpointError
from moerl.metrics import merge_into, to_floats

Z_OLD = torch.tensor(
    [
        [[2, 1, 0.5, -1], [0, 1.5, 1.4, -0.5]],
        [[0.3, 0.2, 1, 0.9], [1.2, -0.3, 0.8, 0.1]],
        [[-0.5, 2.2, 0.1, 0], [0.6, 0.5, 0.4, 0.3]],
    ],
    dtype=torch.float64,
)
CHANGE = torch.tensor(
    [
        [[0.1, -0.3, 0.4, 0], [0, -0.2, 0.1, 0]],
        [[0, 0, -0.1, 0.1], [0, 0.1, -0.1, 0]],
        [[0, 0.3, 0, 0.2], [-0.2, 0.1, 0.2, 0]],
    ],
    dtype=torch.float64,
)
OLD_LOGQ = torch.log_softmax(Z_OLD, -1)
NEW_LOGQ = torch.log_softmax(Z_OLD + CHANGE, -1)
S_OLD = torch.tensor([[[0, 1], [1, 2]], [[2, 3], [0, 2]], [[1, 2], [0, 1]]])
S_NEW = torch.tensor([[[0, 2], [1, 2]], [[2, 3], [0, 2]], [[1, 3], [1, 2]]])
ALL = torch.ones(3, dtype=torch.bool)
TOLERANCE = 2e-6


def close(actual, wanted):
    torch.testing.assert_close(actual, torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=TOLERANCE)


def test_the_sets_are_those_of_the_logits():
    assert torch.equal(Z_OLD.topk(2).indices.sort(-1).values, S_OLD)
    assert torch.equal((Z_OLD + CHANGE).topk(2).indices.sort(-1).values, S_NEW)


def test_vector():
    values = to_floats(route_metrics(S_OLD, S_NEW, ALL, a_logq=OLD_LOGQ, b_logq=NEW_LOGQ))
    wanted = {
        "route/set_change": 0.5,
        "route/expert_change": 0.25,
        "route/jaccard": 0.666667,
        "route/any_layer": 0.666667,
        "route/zero_deviation": 0.333333,
        "route/layers_changed": 1.0,
        "route/kl": 0.008955,
        "route/js": 0.002205,
        "route/tv": 0.049267,
        "route/dev": (0.20 + 0.15 + 0.10 + 0.05 + 0.15 + 0.15) / 6,
        "route/set_change/layer_000": 2 / 3,
        "route/set_change/layer_001": 1 / 3,
    }
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, abs=TOLERANCE)
    dev = [0.05, 0.10, 0.15, 0.15, 0.15, 0.20]
    assert values["route/dev_p90"] == pytest.approx(
        torch.tensor(dev, dtype=torch.float64).quantile(0.9).item(), abs=1e-4
    )


def test_gamma_vector():
    gamma = router_shift_gamma(OLD_LOGQ.gather(-1, S_OLD), NEW_LOGQ.gather(-1, S_OLD))
    close(gamma, [0.839457, 0.927743, 0.860708])
    values = to_floats(gamma_metrics(gamma, ALL, 0.85))
    assert values["route/gamma_mean"] == pytest.approx(float(gamma.mean()))
    assert values["route/gamma_min"] == pytest.approx(float(gamma.min()))
    assert values["route/gamma_floor_frac"] == pytest.approx(1 / 3)
    for name, level in (("p01", 0.01), ("p10", 0.1), ("p50", 0.5)):
        assert values[f"route/gamma_{name}"] == pytest.approx(float(gamma.quantile(level)))


def test_layers_are_a_mean_inside_the_exponent():
    """Deviations of each token and layer; a product over the layers would be smaller."""
    per_layer = torch.stack(
        [
            -router_shift_gamma(OLD_LOGQ.gather(-1, S_OLD)[:, [i]], NEW_LOGQ.gather(-1, S_OLD)[:, [i]]).log()
            for i in range(2)
        ],
        1,
    )
    close(per_layer, [[0.20, 0.15], [0.10, 0.05], [0.15, 0.15]])
    close((-per_layer.sum(1)).exp(), [0.704688, 0.860708, 0.740818])
    close((-per_layer.mean(1)).exp(), [0.839457, 0.927743, 0.860708])


def test_gamma_is_one_for_equal_routers_and_floors_the_logs():
    same = OLD_LOGQ.gather(-1, S_OLD)
    assert router_shift_gamma(same, same).tolist() == [1.0, 1.0, 1.0]
    gone = torch.full((1, 1, 2), -math.inf)
    assert router_shift_gamma(gone, torch.zeros(1, 1, 2)).item() == pytest.approx(1e-8, rel=1e-4)


def test_order_of_slots_and_masked_tokens_do_not_matter():
    wanted = to_floats(route_metrics(S_OLD[:2], S_NEW[:2], ALL[:2], a_logq=OLD_LOGQ[:2], b_logq=NEW_LOGQ[:2]))
    garbage = NEW_LOGQ.clone()
    garbage[2] = math.nan
    mask = torch.tensor([True, True, False])
    got = to_floats(route_metrics(S_OLD.flip(-1), S_NEW, mask, a_logq=OLD_LOGQ, b_logq=garbage))
    assert got == pytest.approx(wanted)
    gamma = torch.tensor([0.9, 0.8, math.nan])
    assert to_floats(gamma_metrics(gamma, mask, 0.85))["route/gamma_mean"] == pytest.approx(0.85)


def test_parts_merge_to_the_whole_but_for_quantiles():
    whole = to_floats(route_metrics(S_OLD, S_NEW, ALL, a_logq=OLD_LOGQ, b_logq=NEW_LOGQ))
    merged: dict = {}
    for rows in (slice(0, 1), slice(1, 3)):
        part = route_metrics(S_OLD[rows], S_NEW[rows], ALL[rows], a_logq=OLD_LOGQ[rows], b_logq=NEW_LOGQ[rows])
        merge_into(merged, part)
    exact = {name: value for name, value in whole.items() if "_p9" not in name}
    got = to_floats(merged)
    assert {name: got[name] for name in exact} == pytest.approx(exact)


def test_layers_keep_their_numbers_and_prefixes_their_names():
    values = route_metrics(S_OLD, S_NEW, ALL, prefix="route_update", layers=[3, 17])
    assert "route_update/jaccard/layer_003" in values
    assert "route_update/jaccard/layer_017" in values
    assert "route_update/kl" not in values


def test_nothing_live_gives_no_value():
    none = torch.zeros(3, dtype=torch.bool)
    assert to_floats(route_metrics(S_OLD, S_NEW, none, a_logq=OLD_LOGQ, b_logq=NEW_LOGQ)) == {}
    assert to_floats(gamma_metrics(torch.ones(3), none, 0.8)) == {}
    assert load_metrics(S_OLD, none, 4) == {}


def test_ids_may_be_as_small_as_the_engine_sends_them():
    wanted = to_floats(route_metrics(S_OLD, S_NEW, ALL, a_logq=OLD_LOGQ, b_logq=NEW_LOGQ))
    small = route_metrics(S_OLD.to(torch.uint8), S_NEW.to(torch.uint8), ALL, a_logq=OLD_LOGQ, b_logq=NEW_LOGQ)
    assert to_floats(small) == wanted
    assert torch.equal(expert_counts(S_OLD.to(torch.uint8), ALL, 4), expert_counts(S_OLD, ALL, 4))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="must have one shape"):
        route_metrics(S_OLD, S_NEW[:, :1], ALL)


def test_chunks_do_not_show(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(50, 3, 16, generator=generator).topk(4).indices for _ in range(2))
    logq = [torch.randn(50, 3, 16, generator=generator).log_softmax(-1) for _ in range(2)]
    mask = torch.rand(50, generator=generator) < 0.7
    whole = to_floats(route_metrics(a, b, mask, a_logq=logq[0], b_logq=logq[1]))
    monkeypatch.setattr("moerl.algorithms.route_metrics._CHUNK_ELEMENTS", 100)
    assert to_floats(route_metrics(a, b, mask, a_logq=logq[0], b_logq=logq[1])) == pytest.approx(whole, abs=1e-12)


def test_load_vector():
    old = to_floats(load_metrics(S_OLD, ALL, 4))
    new = to_floats(load_metrics(S_NEW, ALL, 4))
    wanted_old = {
        "load/entropy/layer_000": 0.959148,
        "load/entropy/layer_001": 0.792481,
        "load/cv/layer_000": 0.333333,
        "load/cv/layer_001": 0.577350,
        "load/max/layer_000": 1.333333,
        "load/max/layer_001": 1.333333,
        "load/min/layer_000": 0.666667,
        "load/min/layer_001": 0.0,
        "load/dead/layer_000": 0.0,
        "load/dead/layer_001": 1.0,
        "load/below_tenth/layer_001": 1.0,
        "load/entropy": (0.959148 + 0.792481) / 2,
        "load/dead": 0.5,
    }
    assert {name: old[name] for name in wanted_old} == pytest.approx(wanted_old, abs=TOLERANCE)
    shares = {0: [1 / 6, 1 / 6, 1 / 3, 1 / 3], 1: [1 / 6, 1 / 3, 1 / 2, 0]}
    for layer, wanted in shares.items():
        even = torch.tensor(wanted, dtype=torch.float64) * 4
        assert new[f"load/max/layer_00{layer}"] == pytest.approx(float(even.max()))
        assert new[f"load/min/layer_00{layer}"] == pytest.approx(float(even.min()))
    assert new["load/entropy/layer_000"] == pytest.approx(0.959148, abs=TOLERANCE)
    assert new["load/entropy/layer_001"] == pytest.approx(0.729574, abs=TOLERANCE)


def test_padding_fills_no_expert():
    """Eight padded tokens that all carry expert 0 change no count."""
    routes = torch.arange(16).view(8, 1, 2) % 8
    padded = torch.cat([routes, torch.zeros(8, 1, 2, dtype=torch.int64)])
    mask = torch.arange(16) < 8
    assert torch.equal(expert_counts(padded, mask, 8), torch.full((1, 8), 2))
    assert torch.equal(expert_counts(padded, mask, 8), expert_counts(routes, mask[:8], 8))


def test_counts_add_up_before_the_ratio_is_taken():
    first, rest = (expert_counts(S_OLD[rows], ALL[rows], 4) for rows in (slice(0, 1), slice(1, 3)))
    assert to_floats(load_of_counts(first + rest)) == to_floats(load_metrics(S_OLD, ALL, 4))


def test_drift_of_the_load_survives_a_restart():
    old, new = expert_counts(S_OLD, ALL, 4), expert_counts(S_NEW, ALL, 4)
    tracker = LoadTracker()
    assert tracker.update(old) == {}
    values = to_floats(tracker.update(new))
    assert values["load/drift_tv/layer_000"] == pytest.approx(0.166667, abs=TOLERANCE)
    assert values["load/drift_tv/layer_001"] == pytest.approx(0.166667, abs=TOLERANCE)
    resumed = LoadTracker()
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    back = to_floats(resumed.update((old / old.sum(1, keepdim=True)).numpy()))
    assert back == to_floats(tracker.update(old))
    assert back["load/drift_tv"] == pytest.approx(0.166667, abs=TOLERANCE)
    assert back["load/drift_tv_first"] == 0
    with pytest.raises(CheckpointError, match="keys"):
        resumed.load_state_dict({"shares": []})


def batch_v_mismatch(batch_v, prefix="mm", **changed):
    fields = {
        "old": batch_v.old,
        "rollout": batch_v.rollout,
        "mask": torch.ones(10, dtype=torch.bool),
        "seq_ids": torch.repeat_interleave(torch.arange(4), batch_v.lengths),
        **changed,
    }
    return to_floats(mismatch_metrics(fields["old"], fields["rollout"], fields["mask"], fields["seq_ids"], 4, prefix))


def test_mismatch_vector(batch_v):
    values = batch_v_mismatch(batch_v)
    wanted = {
        "mm/logp_abs_mean": 0.261,
        "mm/logp_abs_max": 1.2,
        "mm/prob_abs_mean": 0.036871,
        "mm/prob_abs_max": 0.115512,
        "mm/k1": -0.007,
        "mm/k3": 0.111736,
        "mm/extreme_1.5": 0.2,
        "mm/extreme_2": 0.2,
        "mm/extreme_5": 0.0,
        "mm/extreme_10": 0.0,
        "mm/ess_token": 0.827213,
        "mm/ess_seq": 0.742365,
        "mm/chi2_token": 0.512998,
        "mm/pearson_prob": 0.982874,
    }
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, abs=TOLERANCE)
    products = torch.tensor([2.435130, 0.292293, 1.116278, 1.349859])
    assert values["mm/chi2_seq"] == pytest.approx(float((products**2).mean() - 1), abs=2e-5)


@pytest.mark.parametrize("garbage", [math.nan, -math.inf, 5.0, 1e4])
def test_mismatch_ignores_tokens_of_tools(batch_v, garbage):
    mask = torch.arange(10) % 3 != 1
    plain = batch_v_mismatch(batch_v, mask=mask)
    spoiled = torch.where(mask, batch_v.rollout, garbage)
    assert batch_v_mismatch(batch_v, mask=mask, rollout=spoiled) == plain


def test_mismatch_of_one_token_and_of_none(batch_v):
    one = batch_v_mismatch(batch_v, mask=torch.arange(10) == 0)
    assert all(math.isfinite(value) for value in one.values())
    assert "mm/pearson_prob" not in one
    assert batch_v_mismatch(batch_v, mask=torch.zeros(10, dtype=torch.bool)) == {}


def test_mismatch_leaves_out_what_the_engine_did_not_report(batch_v):
    broken = batch_v.rollout.clone()
    broken[1] = -math.inf
    assert batch_v_mismatch(batch_v, rollout=broken) == batch_v_mismatch(batch_v, mask=torch.arange(10) != 1)


def test_mismatch_moves_with_the_policy(batch_v):
    assert batch_v_mismatch(batch_v, old=batch_v.rollout)["mm/k3"] == 0
    total = batch_v_mismatch(batch_v, old=batch_v.now)
    assert total["mm/k3"] > 0
    assert total != batch_v_mismatch(batch_v)
