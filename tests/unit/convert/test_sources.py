"""What folders in the wild look like: fused, tied, with old buffers, in shards, in either spelling of the type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model, save_model

from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.models.hf_export import write_hf_folder

KIND = "dense_first"


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_model(tmp_path / "hf", KIND)


def there_and_back(source: Path, out: Path) -> dict[str, torch.Tensor]:
    import_checkpoint(find(source), out / "shards", Layout(tensor=2, expert=2), Options())
    export_checkpoint(find(out / "shards"), out / "back", Options())
    return load_file(out / "back" / "model.safetensors")


def equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor) for name, tensor in theirs.items()
    )


def variant(folder: Path, name: str, change) -> Path:
    """A copy of `folder` whose tensors and configuration `change` has had."""
    other = folder.with_name(name)
    shutil.copytree(folder, other)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(config))
    return other


def test_fused_experts_as_transformers_5_has_them_in_memory_come_back_one_by_one(folder, tmp_path):
    original = load_file(folder / "model.safetensors")
    fused = {name: tensor.contiguous() for name, tensor in make_model(KIND).state_dict().items()}
    assert "model.layers.1.mlp.experts.gate_up_proj" in fused
    other = variant(folder, "fused", lambda tensors, _: (tensors.clear(), tensors.update(fused)))
    assert equal(there_and_back(other, tmp_path), original)


def test_a_layer_fused_among_others_that_are_not(folder, tmp_path):
    """From a fused tensor no more is read than an expert takes, and each layer is looked at for itself."""
    original = load_file(folder / "model.safetensors")

    def fuse(tensors, _):
        at = "model.layers.2.mlp.experts"
        gates = [torch.cat([tensors.pop(f"{at}.{e}.{part}_proj.weight") for part in ("gate", "up")]) for e in range(8)]
        tensors[f"{at}.gate_up_proj"] = torch.stack(gates)
        tensors[f"{at}.down_proj"] = torch.stack([tensors.pop(f"{at}.{e}.down_proj.weight") for e in range(8)])

    assert equal(there_and_back(variant(folder, "mixed", fuse), tmp_path), original)


def test_rotary_buffers_of_old_files_go_along(folder, tmp_path):
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    other = variant(folder, "old", lambda t, _: t.update({name.format(i): torch.rand(6) for i in range(4)}))
    assert equal(there_and_back(other, tmp_path), load_file(other / "model.safetensors"))
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert manifest["carried"] == {"rotary tables": [name.format(i) for i in range(4)]}
    assert manifest["unmapped"] == []


def test_a_tied_model_has_one_embedding(tmp_path):
    """`test_repeated_head.py` has the files that repeat it."""
    tied = save_model(tmp_path / "tied", KIND, tie_word_embeddings=True)
    original = load_file(tied / "model.safetensors")
    assert "lm_head.weight" not in original
    assert equal(there_and_back(tied, tmp_path), original)
    import_checkpoint(find(tied), tmp_path / "stages", Layout(pipeline=4), Options())
    export_checkpoint(find(tmp_path / "stages"), tmp_path / "of_stages", Options())
    assert equal(load_file(tmp_path / "of_stages" / "model.safetensors"), original)


def test_shards_of_any_cut_are_read(folder, tmp_path):
    original = load_file(folder / "model.safetensors")
    write_hf_folder(tmp_path / "cut", original.items(), folder, max_shard_bytes=40_000)
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 4
    assert equal(there_and_back(tmp_path / "cut", tmp_path), original)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype"])
def test_types_and_both_of_their_spellings(folder, tmp_path, dtype, spelling):
    def change(tensors, config):
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        config.pop("dtype", None)
        config[spelling] = "float64"  # what is true is what the files have

    other = variant(folder, "typed", change)
    assert equal(there_and_back(other, tmp_path), load_file(other / "model.safetensors"))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config[spelling] == str(dtype).removeprefix("torch.")


def test_biases_that_config_json_promises_must_be_there(tmp_path):
    folder = save_model(tmp_path / "hf", "shared")
    name = "model.layers.1.self_attn.k_proj.bias"
    other = variant(folder, "bare", lambda tensors, _: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"unfilled parameters: .*needs {name}"):
        import_checkpoint(find(other), tmp_path / "out", Layout(), Options())


def test_the_tokenizer_travels_along(folder, tmp_path):
    files = {"tokenizer.json": "{}", "chat_template.jinja": "x", "generation_config.json": "{}", "notes.md": "mine"}
    for name, text in files.items():
        (folder / name).write_text(text)
    there_and_back(folder, tmp_path)
    for out in ("shards", "back"):
        kept = {path.name for path in (tmp_path / out).iterdir()} & files.keys()
        assert kept == files.keys() - {"notes.md"}
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "back"))
    assert {key: after[key] for key in before} == before


@pytest.mark.parametrize("between", [(), (Layout(),)])
def test_a_tokenizer_linked_from_elsewhere_is_refused_before_anything_is_read(folder, tmp_path, between):
    (tmp_path / "mine.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "mine.json")
    before = sorted(path.name for path in tmp_path.iterdir())
    convert = import_checkpoint if between else export_checkpoint
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to .*mine\.json, outside of"):
        convert(find(folder), tmp_path / "out", *between, Options())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
