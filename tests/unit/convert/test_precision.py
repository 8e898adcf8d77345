"""Types: kept unless asked, routers kept even then, nothing overflows or mixes without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_model

from moerl.__main__ import main
from moerl.convert.building import num_not_finite
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError, ConfigError


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path) -> Path:
    """Sigmoid routers with a correction bias, all of it float32."""
    return save_model(tmp_path / "hf", "sigmoid")


def there_and_back(folder: Path, tmp_path: Path, **options) -> dict[str, torch.Tensor]:
    import_checkpoint(find(folder), tmp_path / "shards", Layout(expert=2), Options(**options))
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    return load_file(tmp_path / "back" / "model.safetensors")


def test_routers_and_their_biases_keep_their_type(folder, tmp_path):
    original = load_file(folder / "model.safetensors")
    made = there_and_back(folder, tmp_path, dtype=torch.bfloat16)
    for name, tensor in original.items():
        is_router = ".mlp.gate." in name
        assert made[name].dtype == (torch.float32 if is_router else torch.bfloat16), name
        assert torch.equal(made[name], tensor if is_router else tensor.bfloat16()), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_mixed_source_keeps_every_type(folder, tmp_path):
    edit(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items() if "gate." not in n and "norm" not in n}))
    original = load_file(folder / "model.safetensors")
    made = there_and_back(folder, tmp_path)
    for name, tensor in original.items():
        assert made[name].dtype == tensor.dtype
        assert torch.equal(made[name], tensor)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.1.mlp.experts.2.down_proj.weight"]
)
def test_types_that_one_parameter_cannot_have_are_refused_unless_one_is_asked_for(folder, tmp_path, name):
    edit(folder, lambda t: t.update({name: t[name].bfloat16()}))
    with pytest.raises(ConfigError, match=r"would be made of several types \(.*bfloat16.*--dtype"):
        import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options())
    assert not list(tmp_path.glob("*shards*"))
    assert there_and_back(folder, tmp_path, dtype=torch.float32)[name].dtype == torch.float32


def test_a_value_that_does_not_fit_is_refused(folder, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(folder, lambda t: t[name].view(-1).__setitem__(3, 1e30))
    with pytest.raises(CheckpointError, match=r"1 of \d+ values do not fit into float16 \(largest 1e\+30\)"):
        import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options(dtype=torch.float16))
    assert not (tmp_path / "shards").exists()


def test_what_is_not_finite_is_kept_and_told(folder, tmp_path, capsys):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(folder, lambda t: t[name].view(-1).__setitem__(slice(2, 4), torch.tensor([torch.nan, -torch.inf])))
    built = import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options())
    assert built is not None
    assert list(built.not_finite.values()) == [2]
    assert json.loads((tmp_path / "shards" / "manifest.json").read_text())["not_finite"] == built.not_finite
    assert main(["convert", "export", str(tmp_path / "shards"), str(tmp_path / "back")]) == 0
    assert f"warning: {name} has 2 values that are not finite; they were written as they are" in " ".join(
        capsys.readouterr().out.split()
    )
    made = load_file(tmp_path / "back" / "model.safetensors")[name].view(-1)
    assert made[2].isnan()
    assert made[3] == -torch.inf


def test_what_is_not_finite_is_counted():
    assert num_not_finite(torch.tensor([1.0, torch.inf, -torch.inf, torch.nan])) == 3
    assert num_not_finite(torch.full((9,), 3e38)) == 0  # their sum is infinite, none of them is
    assert num_not_finite(torch.tensor([1, 2])) == num_not_finite(torch.empty(0)) == 0


def test_float64_comes_back(folder, tmp_path):
    edit(folder, lambda tensors: tensors.update({name: tensor.double() for name, tensor in tensors.items()}))
    before, after = load_file(folder / "model.safetensors"), there_and_back(folder, tmp_path)
    assert {tensor.dtype for tensor in after.values()} == {torch.float64}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_type_that_no_reader_of_shards_knows_is_refused_before_anything_is_written(folder, tmp_path):
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int32)}))
    with pytest.raises(ConfigError, match=r"output_layer\.weight would be written as int32; .* one with --dtype"):
        import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
