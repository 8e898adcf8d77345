"""Tests against the real SGLang: in an environment of its own (`make sglang`), or skipped with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moerl.rollout.sglang.servers import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("MOERL_SGLANG_PYTHON") or ENVIRONMENT / "bin/python")
"""MOERL_SGLANG_PYTHON names another one than that of `make sglang`."""


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(str(item.fspath)).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.sglang)
            if not os.access(PYTHON, os.X_OK):
                item.add_marker(pytest.mark.skip(reason=f"no environment of SGLang servers at {PYTHON}: `make sglang`"))


@pytest.fixture(scope="session")
def python():
    return PYTHON
