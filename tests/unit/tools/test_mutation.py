"""The settings of mutation testing name what is there: a test file that is gone would fail, and kill every mutant."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = tomllib.loads((ROOT / "tools/mutation/losses.toml").read_text())["cosmic-ray"]


def test_every_file_that_is_named_is_there():
    tests = [word for word in SETTINGS["test-command"].split() if word.endswith(".py")]
    named = [*tests, *SETTINGS["module-path"]]
    assert len(tests) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
