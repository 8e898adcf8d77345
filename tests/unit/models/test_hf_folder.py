from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moerl.errors import CheckpointError, DataError
from moerl.models.hf_folder import INDEX_FILE, SINGLE_FILE, HFFolder, read_config

A, B = torch.arange(6.0).reshape(2, 3), torch.arange(8.0).reshape(2, 4).to(torch.bfloat16)


def write_sharded(folder: Path) -> None:
    save_file({"a": A}, folder / "one.safetensors")
    save_file({"b": B}, folder / "two.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("sharded", [True, False])
def test_reads_single_and_sharded(tmp_path, sharded):
    if sharded:
        write_sharded(tmp_path)
    else:
        save_file({"a": A, "b": B}, tmp_path / SINGLE_FILE)
    folder = HFFolder(tmp_path)
    assert folder.names() == {"a", "b"}
    assert torch.equal(folder.get("a"), A)
    assert folder.get("b").dtype == torch.bfloat16
    assert torch.equal(folder.get("b"), B)
    assert folder.shape("b") == (2, 4)
    with pytest.raises(CheckpointError, match="tensor 'c' is not in"):
        folder.get("c")


def test_reads_part_of_a_fused_tensor(tmp_path):
    fused = torch.randn(3, 4, 5)
    save_file({"f": fused}, tmp_path / SINGLE_FILE)
    assert torch.equal(HFFolder(tmp_path).get_slice("f", 2, 1, 3), fused[2, 1:3])


def test_no_weights(tmp_path):
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path} has neither model\.safetensors nor .*model\.init to random"
    ):
        HFFolder(tmp_path)


def test_an_index_with_something_else_than_file_names(tmp_path):
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": 5, "b": ["one.safetensors"]}}))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map has no file name for a, b; write the index"):
        HFFolder(tmp_path)


def test_missing_shard(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json lists two\.safetensors, which .* lacks; download"):
        HFFolder(tmp_path)


@pytest.mark.parametrize("sharded", [True, False])
def test_truncated_file(tmp_path, sharded):
    write_sharded(tmp_path)
    damaged = tmp_path / "two.safetensors"
    if not sharded:
        (tmp_path / INDEX_FILE).unlink()
        damaged = damaged.rename(tmp_path / SINGLE_FILE)
    truncate(damaged)
    with pytest.raises(CheckpointError, match=rf"{damaged.name} is truncated or damaged"):
        HFFolder(tmp_path)


def test_garbage_and_empty_files(tmp_path):
    for content in (b"", b"not a checkpoint at all"):
        (tmp_path / SINGLE_FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match="is truncated or damaged"):
            HFFolder(tmp_path)


def test_a_tensor_that_its_shard_lacks(tmp_path):
    write_sharded(tmp_path)
    save_file({"x": A}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors lacks b, which model\.safetensors\.index\.json says"):
        HFFolder(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_without_names(tmp_path, content):
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        HFFolder(tmp_path)


def test_config_errors(tmp_path):
    with pytest.raises(DataError, match=r"config\.json does not exist; model\.path must be a Hugging Face folder"):
        read_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{not json")
    with pytest.raises(DataError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    path.write_text("[1, 2]")
    with pytest.raises(DataError, match=r"config\.json holds a list where a JSON object is needed"):
        read_config(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)


def test_a_single_file_beside_shards_is_two_models(tmp_path):
    """transformers takes the single file, whatever the index says."""
    write_sharded(tmp_path)
    save_file({"a": A + 1, "b": B}, tmp_path / SINGLE_FILE)
    told = rf"{tmp_path} has two models: model\.safetensors, and the shards of model\.safetensors\.index\.json, which"
    with pytest.raises(CheckpointError, match=rf"{told} .* Remove model\.safetensors, or model\.safetensors\.index"):
        HFFolder(tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    assert torch.equal(HFFolder(tmp_path).get("a"), A)


def test_an_index_may_list_the_single_file(tmp_path):
    save_file({"a": A}, tmp_path / SINGLE_FILE)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": SINGLE_FILE}}))
    assert HFFolder(tmp_path).names() == {"a"}


@pytest.mark.parametrize("place", [None, "one.safetensors"])
def test_a_tensor_that_the_index_does_not_list(tmp_path, place):
    """Not at all, or for another shard: transformers loads whatever a shard holds."""
    write_sharded(tmp_path)
    held = {"a": A, "c": A + 1} if place else {"a": A}
    save_file(held, tmp_path / "one.safetensors")
    save_file({"b": B, "c": A}, tmp_path / "two.safetensors")
    if place:
        index = json.loads((tmp_path / INDEX_FILE).read_text())
        index["weight_map"]["c"] = place
        (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    told = r"two\.safetensors holds c, which model\.safetensors\.index\.json does not list there; .* Download the index"
    with pytest.raises(CheckpointError, match=told):
        HFFolder(tmp_path)
