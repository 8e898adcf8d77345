"""What a run exports of a model with layers of multi-token prediction: all of it; what it trains and sends: its own."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prediction_layers import save_fp8_with_prediction, save_with_prediction
from quantised_folders import read_files
from safetensors.torch import save_file
from tiny_models import save_model
from torch import Tensor

from moerl.config.schema import CheckpointSection, ModelSection, RunConfig
from moerl.convert.compare import compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.inspection import damaged_files
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.finish import export_weights
from moerl.models.family import PREDICTION, family_of
from moerl.models.hf_folder import read_config


def settings(folder: Path, dtype: str, init: str = "weights") -> RunConfig:
    return replace(
        RunConfig(), model=ModelSection(path=str(folder), init=init), checkpoint=CheckpointSection(export_dtype=dtype)
    )


def predicted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("model.layers.4.", "model.layers.5."))}


@pytest.fixture(scope="module", params=["sigmoid", "latent"])
def folder(request, tmp_path_factory) -> Path:
    return save_with_prediction(tmp_path_factory.mktemp(request.param), request.param)[0]


def test_a_run_s_export_has_the_identical_set_of_tensors_and_says_which_are_older(kit, folder, tmp_path, caplog):
    policy, original = kit.make_policy(folder), read_files(folder)
    with torch.no_grad():
        for tensor in policy._weights.local.values():
            tensor.add_(1)  # as if it were trained
    with caplog.at_level(logging.WARNING):
        for name in ("one", "two"):
            export_weights(settings(folder, "fp32"), tmp_path / name, policy, is_leader=True)
    (record,) = [record for record in caplog.records if record.name == "moerl.finish"]
    assert "tensors of multi-token prediction (model.layers.4.eh_proj.weight" in record.getMessage()
    assert "older than the weights beside them" in record.getMessage()
    found = read_files(tmp_path / "one")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in predicted(original).items())
    assert not any(torch.equal(found[name], original[name]) for name in found.keys() - predicted(original).keys())
    manifest = json.loads((tmp_path / "one" / "moerl_manifest.json").read_text())
    assert manifest["carried"] == {PREDICTION: sorted(predicted(original))}
    assert manifest["carried_is_older"]
    assert manifest["carried_from"] == manifest["converted_from"] == str(folder)
    assert not damaged_files(find(tmp_path / "one"))
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_age_goes_with_them_into_every_later_form(kit, folder, tmp_path):
    export_weights(settings(folder, "fp32"), tmp_path / "hf", kit.make_policy(folder), is_leader=True)
    built = import_checkpoint(find(tmp_path / "hf"), tmp_path / "shards", Layout(), Options())
    assert built is not None
    again = export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    assert again is not None
    assert "older than the weights beside them" in again.warnings[0]
    for place, manifest in (("shards", "manifest.json"), ("back", "moerl_manifest.json")):
        assert json.loads((tmp_path / place / manifest).read_text())["carried_is_older"]
    assert not compare_weights(find(tmp_path / "hf"), find(tmp_path / "back")).differences


def test_types_are_the_export_s_and_routers_keep_theirs(kit, folder, tmp_path):
    """As `moerl convert export` and updates of servers do; rounding a router changes which experts are chosen."""
    policy = kit.make_policy(folder)
    export_weights(settings(folder, "bf16"), tmp_path / "hf", policy, is_leader=True)
    found, original = read_files(tmp_path / "hf"), read_files(folder)
    for name, tensor in [*policy.export(), *predicted(original).items()]:
        kept = name.endswith(("correction_bias", "mlp.gate.weight"))
        assert found[name].dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(found[name], tensor if kept else tensor.bfloat16()), name


def test_only_what_is_trained_is_sent_to_engines(kit, folder):
    hf = read_config(folder)
    names = {name for rule in family_of(hf).weight_rules(hf) for name in rule.hf_names}
    assert {name for name, _ in kit.make_policy(folder).export()} == names


def test_a_policy_from_a_sharded_checkpoint_or_fp8_carries_as_one_from_the_folder(kit, folder, tmp_path):
    import_checkpoint(find(folder), tmp_path / "shards", Layout(tensor=2), Options())
    export_weights(
        settings(tmp_path / "shards", "fp32"),
        tmp_path / "of_shards",
        kit.make_policy(tmp_path / "shards"),
        is_leader=True,
    )
    original, found = read_files(folder), read_files(tmp_path / "of_shards")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
    kind = "latent" if "latent" in str(folder) else "sigmoid"
    quantised, plain = save_fp8_with_prediction(tmp_path / "fp8", kind)
    export_weights(settings(quantised, "bf16"), tmp_path / "of_fp8", kit.make_policy(quantised), is_leader=True)
    found = read_files(tmp_path / "of_fp8")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_a_model_that_began_from_random_weights_has_none(folder, kit, tmp_path):
    export_weights(settings(folder, "fp32", "random"), tmp_path / "hf", kit.make_policy(folder), is_leader=True)
    assert not predicted(read_files(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "moerl_manifest.json").read_text())["carried"] == {}


def test_the_demo_s_policy_is_the_file_that_make_sft_writes(kit, tmp_path):
    """To the byte: types, order and header; that training gives these values `make sft` shows."""
    folder = Path("configs/demo/policy")
    export_weights(settings(folder, "bf16", "random"), tmp_path / "hf", kit.make_policy(folder), is_leader=True)
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_it_exports_its_routers_too_in_the_type_asked_for(kit, tiny_folder, tmp_path):
    """There is no folder whose type they would keep: `make sft` writes the demo's policy so."""
    export_weights(
        settings(tiny_folder, "bf16", "random"), tmp_path / "hf", kit.make_policy(tiny_folder), is_leader=True
    )
    assert {tensor.dtype for tensor in read_files(tmp_path / "hf").values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_head_that_repeats_the_embedding_is_the_embedding_that_was_trained(kit, tmp_path, dtype):
    """A copy of what `model.path` has under the second name would be older than the model."""
    source = save_model(tmp_path / "hf", "dense_first", tie_word_embeddings=True)
    original = read_files(source)
    head = {"lm_head.weight": original["model.embed_tokens.weight"].clone()}
    save_file(original | head, source / "model.safetensors", metadata={"format": "pt"})
    import_checkpoint(find(source), tmp_path / "shards", Layout(tensor=2, pipeline=2), Options())
    for place in (source, tmp_path / "shards"):
        policy = kit.make_policy(place)
        with torch.no_grad():
            for tensor in policy._weights.local.values():
                tensor.add_(1)  # as if it were trained
        out = tmp_path / f"of_{place.name}"
        export_weights(settings(place, dtype), out, policy, is_leader=True)
        found = read_files(out)
        assert found.keys() == original.keys() | head.keys()
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
        assert not torch.equal(found["lm_head.weight"].float(), head["lm_head.weight"])
        assert json.loads((out / "moerl_manifest.json").read_text())["repeated"] == {
            "lm_head.weight": "model.embed_tokens.weight"
        }
        assert not damaged_files(find(out))
