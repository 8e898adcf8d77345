"""Mistakes of public converters that no other test of this folder would see; docs/conversion.md lists them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_model

from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.models.family import family_of
from moerl.models.hf_folder import read_config
from moerl.shards import ShardReader


def there_and_back(folder: Path, out: Path, layout: Layout, **options) -> dict[str, torch.Tensor]:
    import_checkpoint(find(folder), out / "shards", layout, Options(**options))
    export_checkpoint(find(out / "shards"), out / "back", Options(**options))
    return load_file(out / "back" / "model.safetensors")


@pytest.mark.parametrize("vocab", [37, 41, 64])
@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_filling_rows_of_the_vocabulary_never_leave(tmp_path, vocab, tensor):
    """Megatron-Bridge 625 and 5375: padded rows were exported, or the configuration was inflated."""
    folder = save_model(tmp_path / "hf", "softmax", vocab_size=vocab, num_key_value_heads=6)
    made = there_and_back(folder, tmp_path, Layout(tensor=tensor))
    original = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(made[name], original[name])
    assert read_config(tmp_path / "back")["vocab_size"] == vocab
    with ShardReader(tmp_path / "shards") as reader:
        assert reader.entries["weights/output_layer.weight"].shape == (vocab, 40)


def test_a_correction_bias_of_large_values_chooses_the_same_experts(tmp_path):
    """sglang 37133, 31213: in bf16, 256 values between 6.8 and 7.05 become 8, and nearly every token moves."""
    folder = save_model(tmp_path / "hf", "sigmoid")
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    names = [name for name in tensors if name.endswith("e_score_correction_bias")]
    biases = {name: 6.8 + 0.25 * torch.rand(tensors[name].shape, generator=generator) for name in names}
    save_file({**tensors, **biases}, folder / "model.safetensors")
    made = there_and_back(folder, tmp_path, Layout(expert=2), dtype=torch.bfloat16)
    scores = torch.rand(512, 12, generator=generator) * 0.3
    for name, bias in biases.items():
        assert made[name].dtype == torch.float32
        chosen, rounded = ((scores + b).topk(4).indices.sort().values for b in (made[name], bias.bfloat16().float()))
        assert torch.equal(chosen, (scores + bias).topk(4).indices.sort().values)
        assert (chosen != rounded).any(1).float().mean() > 0.02  # what the mistake would have done


def test_layers_of_multi_token_prediction_beyond_those_that_config_json_names_are_refused(tmp_path):
    """Megatron-Bridge 4960, ms-swift 6644: such tensors went missing without a word."""
    folder = save_model(tmp_path / "hf", "sigmoid")
    tensors = load_file(folder / "model.safetensors")
    layers = read_config(folder)["num_hidden_layers"]
    extra = {f"model.layers.{layers}.{part}.weight": torch.ones(3) for part in ("enorm", "eh_proj", "mlp.gate")}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    made = there_and_back(folder, tmp_path, Layout())
    assert made.keys() == tensors.keys() | extra.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in extra.items())
    save_file({**tensors, f"model.layers.{layers + 1}.enorm.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"unmapped tensors: model\.layers\.{layers + 1}\.enorm\.weight"):
        import_checkpoint(find(folder), tmp_path / "again", Layout(), Options())


def test_no_parameter_keeps_what_was_there_before(tmp_path):
    """Megatron-LM 5844: stacked keys met a schema of one key per expert, and experts kept their initial values."""
    folder = save_model(tmp_path / "hf", "softmax")
    import_checkpoint(find(folder), tmp_path / "shards", Layout(expert=4, tensor=2), Options())
    hf = read_config(folder)
    wanted = sum(len(rule.hf_names) for rule in family_of(hf).weight_rules(hf))
    with ShardReader(tmp_path / "shards") as reader:
        for name, entry in reader.entries.items():
            assert sum(torch.Size(part.size).numel() for part in entry.parts) == entry.numel, name
    assert len(find(tmp_path / "shards").open().names()) == wanted
    description = tmp_path / "shards" / "rank_00003.json"
    state = json.loads(description.read_text())
    key = next(name for name in state["tensors"] if ".experts." in name)
    del state["tensors"][key]["parts"][0]
    description.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"the files hold 0 of the \d+ elements of weights/.*experts"):
        find(tmp_path / "shards").open()
