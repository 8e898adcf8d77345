"""Exports of runs take layers of multi-token prediction from where the run began."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conversions import save_run
from prediction_layers import save_fp8_with_prediction, save_with_prediction
from quantised_folders import read_files
from torch import Tensor

from moerl.__main__ import main
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.inspection import inspect_model
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.models.family import families
from moerl.models.hf_folder import read_config

PREDICTED = ("model.layers.4", "model.layers.5")
FP8 = Options(dtype=torch.bfloat16, fp8_blocks=True)


@pytest.fixture
def small(tmp_path) -> Path:
    return save_with_prediction(tmp_path / "hf", "sigmoid")[0]


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_an_export_of_a_run_takes_them_from_where_the_run_began(small, tmp_path, capsys):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    for number, model in enumerate((small, tmp_path / "shards")):
        run, out = save_run(tmp_path / f"run{number}", tmp_path / "shards", model), tmp_path / f"back{number}"
        assert main(["convert", "export", str(run), str(out)]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert told.count("older than the weights beside them") == 1
        assert f"are those of {model}" in told
        same(read_files(out), read_files(small))
        manifest = json.loads((out / "moerl_manifest.json").read_text())
        assert manifest["carried_is_older"]
        assert manifest["carried_from"] == str(model)
        assert inspect_model(find(run))["carried"]["is_older"]
    path = tmp_path / "shards" / "carried_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert main(["convert", "export", str(tmp_path / "run1"), str(tmp_path / "again")]) == 1
    assert "carried_00000.safetensors does not match its SHA-256" in " ".join(capsys.readouterr().err.split())


def test_an_export_of_a_run_whose_folder_has_none_says_so(small, tmp_path, capsys):
    """`--settings` may be a folder with a configuration and a tokenizer alone."""
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((small / "config.json").read_bytes())
    run = save_run(tmp_path / "run", tmp_path / "shards", tmp_path / "gone")
    assert main(["convert", "export", str(run), str(tmp_path / "back"), "--settings", str(bare)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"config.json speaks of multi-token prediction, and {bare} has no tensors of it" in told
    original = read_files(small)
    same(read_files(tmp_path / "back"), {name: t for name, t in original.items() if name[:14] not in PREDICTED})
    assert main(["convert", "export", str(run), str(tmp_path / "with"), "--settings", str(small)]) == 0
    same(read_files(tmp_path / "with"), original)


def test_an_export_of_a_run_from_random_weights_takes_none_of_the_folder(small, tmp_path, capsys):
    """Layers that predict tokens of another model's would come from the folder that gave the run its sizes."""
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    run = save_run(tmp_path / "run", tmp_path / "shards", small)
    with (run / "config.yaml").open("a") as file:
        file.write("  init: random\n")
    own = {name: tensor for name, tensor in read_files(small).items() if name[:14] not in PREDICTED}
    for number, more in enumerate(([], ["--settings", str(small)])):
        out = tmp_path / f"back{number}"
        assert main(["convert", "export", str(run), str(out), *more]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "the run began from random weights (model.init)" in told
        assert "engines cannot decode speculatively with it" in told
        same(read_files(out), own)
        manifest = json.loads((out / "moerl_manifest.json").read_text())
        assert (manifest["carried"], manifest["carried_from"], manifest["repeated"]) == ({}, None, {})
    import_checkpoint(find(run), tmp_path / "again", Layout(), Options())
    assert not list((tmp_path / "again").glob("carried*"))


def test_an_export_of_a_run_is_of_the_family_that_was_trained(small, tmp_path):
    """`model.family` names it where config.json does not."""
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    name = next(name for name in families.names() if type(find(small).family) is families.get(name).target)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))
    run = save_run(tmp_path / "run", tmp_path / "shards", small)
    with pytest.raises(CheckpointError, match="which no model family supports"):
        find(run)
    with (run / "config.yaml").open("a") as file:
        file.write(f"  family: {name}\n")
    assert type(find(run).family) is families.get(name).target
    export_checkpoint(find(run), tmp_path / "back", Options())
    same(read_files(tmp_path / "back"), read_files(small))


def test_a_run_that_began_from_fp8_gives_back_its_codes_and_scales(tmp_path):
    """Its weights are what training made of them; what nothing trained is what the folder had."""
    folder, plain = save_fp8_with_prediction(tmp_path / "fp8", "latent")
    stored = read_files(folder)
    import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options())
    run = save_run(tmp_path / "run", tmp_path / "shards", folder)
    export_checkpoint(find(run), tmp_path / "back", FP8)
    same(read_files(tmp_path / "back"), stored)
    export_checkpoint(find(run), tmp_path / "plain", Options(dtype=torch.bfloat16))
    found = read_files(tmp_path / "plain")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    config = read_config(tmp_path / "plain")
    assert "quantization_config" not in config
