"""What an export would refuse after the last step is told before the first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moerl.build import build_run
from moerl.configure import load
from moerl.errors import CheckpointError


def test_a_tokenizer_that_no_export_may_copy_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree("configs/demo/policy", model)
    (model / "tokenizer.json").rename(tmp_path / "mine.json")
    (model / "tokenizer.json").symlink_to(tmp_path / "mine.json")
    cfg = load("configs/demo/grpo.yaml", [f"model.path={model}", f"run.output_dir={tmp_path / 'runs'}"])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to .*mine\.json, outside of"):
        build_run(cfg)
    assert not list((tmp_path / "runs").rglob("*.yaml"))
