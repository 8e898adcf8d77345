"""A target never takes the place of what is read, nor of what it was not told to replace."""

from __future__ import annotations

import pytest
import torch
from tiny_models import save_model

from moerl.convert.building import Building, PlannedFile
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import ConfigError
from moerl.tensor_file import Described


@pytest.mark.parametrize(
    ("source", "target"),
    [("link", "hf"), ("hf", "x/../hf"), ("hf", "parent/hf"), ("parent/hf", "hf"), ("hf", "link/inside")],
)
def test_a_target_that_is_the_source_by_another_name_is_refused(tmp_path, source, target):
    folder = save_model(tmp_path / "hf", "softmax")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "parent").symlink_to(tmp_path)
    before = sorted(folder.iterdir())
    for action in (
        lambda: import_checkpoint(find(tmp_path / source), tmp_path / target, Layout(), Options(overwrite=True)),
        lambda: export_checkpoint(find(tmp_path / source), tmp_path / target, Options(overwrite=True)),
    ):
        with pytest.raises(ConfigError, match="lie inside one another"):
            action()
        assert sorted(folder.iterdir()) == before


def test_a_link_to_the_source_is_replaced_and_the_source_kept(tmp_path):
    folder = save_model(tmp_path / "hf", "softmax")
    (tmp_path / "link").symlink_to(folder)
    import_checkpoint(find(folder), tmp_path / "link", Layout(), Options(overwrite=True))
    assert not (tmp_path / "link").is_symlink()
    assert find(folder).form == "huggingface"


def test_a_target_that_appears_meanwhile_is_kept(tmp_path):
    """What was made stays too: the same command goes on with it once it is told what to do."""
    out, files = tmp_path / "out", [PlannedFile("f", (Described("x", torch.float32, (4,)),))]

    def make(number: int):
        out.mkdir()
        (out / "mine").write_text("kept")
        yield torch.zeros(4)

    with pytest.raises(ConfigError, match="out exists and is left as it is"):
        Building(out, files, {}).build(make, lambda *_: None)
    assert [path.name for path in out.iterdir()] == ["mine"]
    built = Building(out, files, {}, overwrite=True).build(make, lambda *_: None)
    assert built is not None
    assert built.num_resumed == 1
