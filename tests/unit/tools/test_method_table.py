"""docs/algorithms.md shows the presets as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from moerl.algorithms.presets import PRESETS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("method_table", ROOT / "tools/method_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_presets(tool):
    text = tool.PAGE.read_text()
    assert tool.with_table(text) == text, "run tools/method_table.py"
    for name in PRESETS:
        assert f"| `{name}` |" in text


def test_a_page_that_is_behind_is_found(tool):
    text = tool.PAGE.read_text()
    behind = text.replace("| `gspo` |", "| `gspoo` |")
    assert behind != text
    assert tool.with_table(behind) == text


def test_a_page_without_marks_is_refused(tool):
    with pytest.raises(SystemExit, match="are missing"):
        tool.with_table("# Algorithms\n")


def test_every_trust_region_of_a_preset_has_its_formula(tool):
    """A loss that no preset has is described by its own docstring."""
    text = tool.PAGE.read_text()
    formulas = text[text.index("| trust region |") : text.index("## Methods")]
    names = {preset.values.get("trust", {"name": "clip"})["name"] for preset in PRESETS.values()}
    assert len(names) >= 9
    assert sorted(name for name in names if f"| `{name}` |" not in formulas) == []
