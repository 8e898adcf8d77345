"""A checkpoint of which files are gone is refused: the model that its run began from never stands in for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conversions import save_run
from tiny_models import save_model

from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError


def without_description(step: Path) -> None:
    (step / "learner" / "rank_00000.json").unlink()


def without_manifest_either(step: Path) -> None:
    without_description(step)
    (step / "manifest.json").unlink()


def without_learner(step: Path) -> None:
    shutil.rmtree(step / "learner")


@pytest.mark.parametrize("damage", [without_description, without_manifest_either, without_learner])
def test_a_checkpoint_without_its_shards_is_not_read_from_the_model_it_began_from(tmp_path, damage):
    hf = save_model(tmp_path / "hf", "softmax")
    import_checkpoint(find(hf), tmp_path / "trained", Layout(), Options())
    run = save_run(tmp_path / "run", tmp_path / "trained", hf)
    step = run / "checkpoints" / "step_000002"
    export_checkpoint(find(step), tmp_path / "whole", Options())
    damage(step)
    for path in (step, run):
        with pytest.raises(CheckpointError, match=r"learner holds no rank_00000\.json, so the checkpoint is incompl"):
            export_checkpoint(find(path), tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()
