"""The step-0 contract: in fp32 it stops the run, in lower precision it reports and warns."""

from __future__ import annotations

import logging
import math

import pytest

from moerl.contract import EXPECTED_BAND, StepZeroContract
from moerl.errors import NumericsError

LIMIT = 1e-5
AGREES = {
    "mm/logp_abs_max": 0.5,  # what follows from a near tie
    "contract/logp_gap": 0.9 * LIMIT,
    "contract/route_margin": 0.9 * LIMIT,
    "contract/ratio_deviation": 0.9 * LIMIT,
    "contract/clip_fraction": 0.0,
    "reward/mean": 17.0,
}
BREAKS = [
    ("contract/logp_gap", 1.1 * LIMIT, "the trainer's logprobs differ from the engine's"),
    ("contract/route_margin", 1.1 * LIMIT, "routes differ that were no near tie"),
    ("contract/ratio_deviation", 1.1 * LIMIT, "the first minibatch's ratio is not 1"),
    ("contract/clip_fraction", 1e-9, "a clip binds in the first minibatch"),
]


def test_it_holds_when_both_sides_agree():
    assert StepZeroContract("fp32", "fp32").check(AGREES) == {"contract/holds": 1.0}


def test_what_was_not_measured_is_not_held_against_the_run():
    measured = {name: value for name, value in AGREES.items() if name != "contract/route_margin"}
    assert StepZeroContract("fp32", "fp32").check(measured) == {"contract/holds": 1.0}


@pytest.mark.parametrize(("name", "value", "meaning"), BREAKS)
def test_each_breach_stops_an_fp32_run_and_is_named_with_its_number(name, value, meaning):
    with pytest.raises(NumericsError) as caught:
        StepZeroContract("fp32", "fp32").check({**AGREES, name: value})
    text = str(caught.value)
    assert f"{meaning}: {name} = {value:.3g}, allowed " in text
    assert "telemetry.dump_batches=true" in text
    assert "raise telemetry.contract_tolerance" in text
    assert not [other for other, _, _ in BREAKS if other != name and other in text]


def test_the_tolerance_is_the_runs_own():
    with pytest.raises(NumericsError, match="allowed 1e-05"):
        StepZeroContract("fp32", "fp32").check({**AGREES, "contract/logp_gap": 3e-5})
    wider = StepZeroContract("fp32", "fp32", tolerance=4e-5)
    assert wider.check({**AGREES, "contract/logp_gap": 3e-5}) == {"contract/holds": 1.0}


def test_an_engine_may_round_more_which_widens_the_bound_of_logprobs_alone():
    rounding = StepZeroContract("fp32", "fp32", engine_rounding=5e-5)
    assert rounding.check({**AGREES, "contract/logp_gap": 4e-5}) == {"contract/holds": 1.0}
    for name, value in (
        ("contract/logp_gap", 6e-5),
        ("contract/route_margin", 4e-5),
        ("contract/ratio_deviation", 4e-5),
    ):
        with pytest.raises(NumericsError, match=name):
            rounding.check({**AGREES, name: value})


@pytest.mark.parametrize("name", [name for name, _, _ in BREAKS])
def test_not_a_number_is_a_breach(name):
    with pytest.raises(NumericsError, match=f"{name} = nan"):
        StepZeroContract("fp32", "fp32").check({**AGREES, name: math.nan})


def test_all_breaches_come_in_one_error():
    with pytest.raises(NumericsError) as caught:
        StepZeroContract("fp32", "fp32").check({name: value for name, value, _ in BREAKS})
    assert all(meaning in str(caught.value) for _, _, meaning in BREAKS)


@pytest.mark.parametrize(("learner", "engine"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp8")])
def test_lower_precision_reports_a_breach_and_goes_on(learner, engine, caplog):
    assert not StepZeroContract(learner, engine).is_exact
    values = {**AGREES, "mm/logp_abs_max": 0.05, "contract/logp_gap": 0.05}
    with caplog.at_level(logging.WARNING):
        assert StepZeroContract(learner, engine).check(values) == {"contract/holds": 0.0}
    assert not caplog.records  # within the band of every precision


@pytest.mark.parametrize(
    ("learner", "engine", "band"),
    [("bf16", "fp32", "bf16"), ("fp32", "int8", "int8"), ("bf16", "fp8", "fp8"), ("fp8", "bf16", "fp8")],
)
def test_the_coarser_side_sets_the_band_and_beyond_it_a_warning_says_both_numbers(learner, engine, band, caplog):
    contract, limit = StepZeroContract(learner, engine), EXPECTED_BAND[band]
    with caplog.at_level(logging.WARNING):
        contract.check({"mm/logp_abs_max": limit})
        assert not caplog.records
        contract.check({"mm/logp_abs_max": 2 * limit})
    (record,) = caplog.records
    assert f"up to {2 * limit:.3g} at step 0; {band} usually stays within {limit:.3g}" in record.getMessage()


def test_not_a_number_is_beyond_every_band(caplog):
    with caplog.at_level(logging.WARNING):
        assert StepZeroContract("bf16", "fp32").check({"mm/logp_abs_max": math.nan, "contract/logp_gap": math.nan}) == {
            "contract/holds": 0.0
        }
    assert "nan" in caplog.text
