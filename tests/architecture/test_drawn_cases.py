"""A test that draws its cases draws the same ones in every run, on any machine."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings


def test_drawn_cases_are_the_same_in_every_run(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--hypothesis-profile", default=None):
        pytest.skip("another profile was asked for")
    assert settings().derandomize
    assert settings().deadline is None
    assert settings().database is None
    assert HealthCheck.too_slow in settings().suppress_health_check
