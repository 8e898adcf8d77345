"""The learner starts from a folder with FP8 blocks and publishes the plain model that the folder stands for."""

from __future__ import annotations

import pytest
import torch
from quantised_folders import edit_config, read_files, save_fp8, write_files

from moerl.errors import CheckpointError
from moerl.reference.config import ReferenceConfig
from moerl.reference.loading import read_weights
from moerl.reference.sampling import Sampler
from moerl.run_folder import model_id


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    return save_fp8(tmp_path_factory.mktemp("fp8"), "dense_first")


def test_the_learner_takes_it_and_the_local_engine_takes_what_it_publishes(kit, fp8):
    folder, plain = fp8
    published = {name: tensor.clone() for name, tensor in kit.make_policy(folder).export()}
    assert published.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(published[name], tensor.float()), name
    Sampler(ReferenceConfig.from_folder(folder)).load_weights(published.items())


def test_the_reference_refuses_stored_blocks_instead_of_casting_them(fp8):
    with pytest.raises(CheckpointError, match=r"a.safetensors: model.layers.0.* is torch.float8_e4m3fn"):
        dict(read_weights(fp8[0]))


def test_how_weights_are_stored_does_not_tell_models_apart(fp8, tmp_path):
    folder, _ = fp8
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    before = model_id(str(tmp_path))
    edit_config(tmp_path, quantization_config=None)
    assert model_id(str(tmp_path)) == before == model_id(str(folder))
    edit_config(tmp_path, hidden_size=208)
    assert model_id(str(tmp_path)) != before


def test_a_missing_scale_stops_the_learner(kit, fp8, tmp_path):
    folder, name = fp8[0], "model.layers.1.mlp.experts.3.down_proj.weight"
    stored = read_files(folder)
    del stored[f"{name}_scale_inv"]
    write_files(tmp_path, {"all.safetensors": stored})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"float8 tensor '{name}' has no scale"):
        kit.make_policy(tmp_path)
