"""Every YAML under configs/ loads and passes all rules, and the base file names every setting with its default."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moerl.algorithms.compose import composition_errors
from moerl.algorithms.presets import PRESETS
from moerl.config.load import as_dict, config_from_dict, load_config, read_values
from moerl.config.overlay import every_key, fields_of, kind_at
from moerl.config.rules import config_errors
from moerl.config.schema import RunConfig
from moerl.configure import check_plugins

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
RECIPES = [path for path in CONFIGS if path.name != "base.yaml"]
PRESET_VALUES = {name: preset.values for name, preset in PRESETS.items()}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "configs").as_posix()


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_every_recipe_loads_and_passes_every_rule(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    cfg = load_config(path, presets=PRESET_VALUES)
    assert config_errors(cfg, extra_rules=[lambda values: composition_errors(values["algorithm"])]) == []
    check_plugins(cfg)


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.name == "base.yaml"], ids=name_of)
def test_every_base_lacks_only_what_its_recipes_add(path):
    load_config(path, ["run.name=x", "run.num_steps=1", "model.path=x"], presets=PRESET_VALUES)


def test_run_names_are_unique():
    """Two recipes of one name would resume each other's runs."""
    names = [load_config(path, presets=PRESET_VALUES).run.name for path in RECIPES]
    assert len(set(names)) == len(names)


def test_the_base_file_names_every_setting_with_its_default():
    values = read_values(ROOT / "configs" / "base" / "base.yaml")
    named = set()
    for section, items in values.items():
        for key, item in items.items():
            kind = fields_of(fields_of(RunConfig)[section].section)[key]
            inner = kind.section and not kind.is_list and kind.plugin is None
            named |= {f"{section}.{key}.{name}" for name in item} if inner else {f"{section}.{key}"}
    leaves = {path for path in every_key() if (kind := kind_at(path)).plugin or kind.is_list or not kind.section}
    assert named == {path for path in leaves if not path.startswith("algorithm.")} | {"algorithm.preset"}
    sections = {
        **values,
        "run": {**values["run"], "name": "x", "num_steps": 1},
        "model": {**values["model"], "path": "x"},
    }
    default = config_from_dict({"run": {"name": "x", "num_steps": 1}, "model": {"path": "x"}})
    assert as_dict(config_from_dict({**sections, "algorithm": {}})) == as_dict(default)


def test_check_config_imports_no_model_library():
    code = (
        "import sys; sys.path.insert(0, 'tools'); import check_config;"
        "status = check_config.main(['configs/demo/sft.yaml']);"
        "print([name for name in ('megatron', 'transformers', 'sglang', 'wandb') if name in sys.modules], status,"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.strip().splitlines()[-1] == "[] 0"
    assert "name: demo-sft" in done.stdout
