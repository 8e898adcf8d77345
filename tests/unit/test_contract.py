"""The step-0 contract: in fp32 it stops the run, in lower precision it reports and warns."""

from __future__ import annotations

import logging
import math

import pytest

from moerl.algorithms.mismatch_metrics import FP32_LOGPROB_TOLERANCE as LOGPROB_TOLERANCE
from moerl.contract import (
    EXPECTED_BAND,
    LARGEST_FRACTION_BEYOND,
    LARGEST_TOLERANCE,
    MARGIN_TOLERANCE,
    StepZeroContract,
)
from moerl.errors import NumericsError

AGREES = {
    "mm/logp_abs_mean": 0.9 * LOGPROB_TOLERANCE,
    "contract/logp_beyond_fraction": 0.9 * LARGEST_FRACTION_BEYOND,
    "mm/logp_abs_max": 0.9 * LARGEST_TOLERANCE,
    "route/max_margin_of_changed": 0.9 * MARGIN_TOLERANCE,
    "contract/ratio_deviation": 0.9 * LOGPROB_TOLERANCE,
    "contract/clip_fraction": 0.0,
    "reward/mean": 17.0,
}
BREAKS = [
    ("mm/logp_abs_mean", 1.1 * LOGPROB_TOLERANCE, "the trainer's logprobs differ from the engine's"),
    (
        "contract/logp_beyond_fraction",
        1.1 * LARGEST_FRACTION_BEYOND,
        "too many of the trainer's logprobs are further than 1e-05 from the engine's",
    ),
    ("mm/logp_abs_max", 1.1 * LARGEST_TOLERANCE, "the trainer's logprobs differ from the engine's at some token"),
    ("route/max_margin_of_changed", 1.1 * MARGIN_TOLERANCE, "routes differ that were no near tie"),
    ("contract/ratio_deviation", 1.1 * LOGPROB_TOLERANCE, "the first minibatch's ratio is not 1"),
    ("contract/clip_fraction", 1e-9, "a clip binds in the first minibatch"),
]


def test_it_holds_when_both_sides_agree():
    assert StepZeroContract("fp32", "fp32").check(AGREES) == {"contract/holds": 1.0}


def test_what_was_not_measured_is_not_held_against_the_run():
    measured = {name: value for name, value in AGREES.items() if not name.startswith("route/")}
    assert StepZeroContract("fp32", "fp32").check(measured) == {"contract/holds": 1.0}


@pytest.mark.parametrize(("name", "value", "meaning"), BREAKS)
def test_each_breach_stops_an_fp32_run_and_is_named_with_its_number(name, value, meaning):
    with pytest.raises(NumericsError) as caught:
        StepZeroContract("fp32", "fp32").check({**AGREES, name: value})
    text = str(caught.value)
    assert f"{meaning}: {name} = {value:.3g}, allowed " in text
    assert "telemetry.dump_batches=true" in text
    assert not [other for other, _, _ in BREAKS if other != name and other in text]


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
    values = {**AGREES, "mm/logp_abs_max": 0.05}
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
        assert StepZeroContract("bf16", "fp32").check({"mm/logp_abs_max": math.nan}) == {"contract/holds": 0.0}
    assert "nan" in caplog.text
