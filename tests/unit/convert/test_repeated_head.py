"""A tied model whose files hold the embedding a second time, as the head: it comes back as it was, and never stale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conversions import save_run
from quantised_folders import read_files, write_files
from safetensors.torch import load_file, save_file
from tiny_models import save_model

from moerl.__main__ import main
from moerl.convert.compare import compare_forwards, compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.inspection import inspect_model
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_head(folder: Path, change=lambda tensor: tensor) -> Path:
    """The folder, its file with a copy of the embedding that `change` has had."""
    tensors = load_file(folder / "model.safetensors")
    assert HEAD not in tensors
    tensors[HEAD] = change(tensors[EMBEDDING].clone())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(params=["dense_first", "llama", "latent"])
def folder(request, tmp_path) -> Path:
    return with_head(save_model(tmp_path / "hf", request.param, tie_word_embeddings=True))


@pytest.fixture
def small(tmp_path) -> Path:
    return with_head(save_model(tmp_path / "hf", "dense_first", tie_word_embeddings=True))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2, "pipeline": 2}])
def test_import_export_and_verify_keep_the_identical_set_of_tensors(folder, tmp_path, sizes):
    import_checkpoint(find(folder), tmp_path / "shards", Layout(**sizes), Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options(max_file_bytes=50_000))
    same(read_files(tmp_path / "back"), read_files(folder))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert {HEAD, EMBEDDING} <= index["weight_map"].keys()
    for place in (tmp_path / "shards", tmp_path / "back"):
        assert not compare_weights(find(folder), find(place)).differences
        assert inspect_model(find(place))["repeated"] == {HEAD: EMBEDDING}
    said = compare_forwards(find(folder), find(tmp_path / "shards"), num_tokens=8, seed=0)
    assert said.differences(1e-5) == []
    for name in ("shards/manifest.json", "back/moerl_manifest.json"):
        manifest = json.loads((tmp_path / name).read_text())
        assert (manifest["repeated"], manifest["unmapped"]) == ({HEAD: EMBEDDING}, [])


def test_it_is_cast_as_the_embedding_is(small, tmp_path):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    for number, options in enumerate((Options(dtype=torch.bfloat16), Options(dtype=torch.bfloat16, fp8_blocks=True))):
        export_checkpoint(find(tmp_path / "shards"), tmp_path / f"{number}", options)
        found = read_files(tmp_path / f"{number}")
        assert found[HEAD].dtype is torch.bfloat16
        assert torch.equal(found[HEAD], found[EMBEDDING])


def test_a_folder_without_it_is_another_set_of_tensors(small, tmp_path, capsys):
    bare = save_model(tmp_path / "bare", "dense_first", tie_word_embeddings=True)
    ((name, what),) = [(one.name, one.what) for one in compare_weights(find(bare), find(small)).differences]
    assert (name, what) == (HEAD, f"only in {small}, a copy of {EMBEDDING}")
    import_checkpoint(find(bare), tmp_path / "shards", Layout(), Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    assert HEAD not in read_files(tmp_path / "back")
    assert main(["convert", "inspect", str(small)]) == 0
    assert f"held twice: {HEAD} is a copy of {EMBEDDING}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensor: tensor.index_fill(0, torch.tensor(7), 0.5), "40 of their 2160 values differ"),
        (lambda tensor: tensor.bfloat16(), r"the files hold bfloat16 \[54, 40\] and float32 \[54, 40\]"),
        (lambda tensor: tensor[:50].contiguous(), r"the files hold float32 \[50, 40\] and float32 \[54, 40\]"),
    ],
)
def test_a_copy_that_is_none_is_refused_with_both_names(tmp_path, change, told):
    """Some readers take the head from the file then, and some the embedding."""
    folder = with_head(save_model(tmp_path / "hf", "dense_first", tie_word_embeddings=True), change)
    for convert in (
        lambda: import_checkpoint(find(folder), tmp_path / "out", Layout(), Options()),
        lambda: export_checkpoint(find(folder), tmp_path / "out", Options()),
    ):
        with pytest.raises(CheckpointError, match=rf"{HEAD} and {EMBEDDING} are one tensor .*, but {told}"):
            convert()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    left = Options(allowed=(r"lm_head\.weight",))
    import_checkpoint(find(folder), tmp_path / "out", Layout(), left)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["repeated"], manifest["unmapped"]) == ({}, [HEAD])


def test_an_export_of_a_run_has_it_where_the_run_began_with_it(small, tmp_path):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    for number, model in enumerate((small, tmp_path / "shards")):
        run = save_run(tmp_path / f"run{number}", tmp_path / "shards", model)
        export_checkpoint(find(run), tmp_path / f"back{number}", Options())
        same(read_files(tmp_path / f"back{number}"), read_files(small))


def test_in_files_of_their_own_they_are_read_and_held_together(small, tmp_path):
    tensors = read_files(small)
    (small / "model.safetensors").unlink()
    head = {HEAD: tensors.pop(HEAD)}
    write_files(small, {"a.safetensors": tensors, "b.safetensors": head})
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    write_files(small, {"a.safetensors": tensors, "b.safetensors": {HEAD: head[HEAD] + 1}})
    with pytest.raises(CheckpointError, match="2160 of their 2160 values differ"):
        find(small).open()
