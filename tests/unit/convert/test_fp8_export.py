"""`export --dtype fp8-block`: the hub's layout, one rounding of each value; what came from FP8 comes back."""

from __future__ import annotations

import json

import pytest
import torch
from quantised_folders import BLOCK, SETTINGS, is_linear, plain_of, read_files, save_bfloat16, save_fp8, write_files
from safetensors.torch import load_file, save_file

from moerl.__main__ import main
from moerl.convert.compare import compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.fp8_folders import fp8_names, quantization_config
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.models.family import family_of

FP8 = Options(dtype=torch.bfloat16, fp8_blocks=True)


@pytest.mark.parametrize("kind", ["dense_first", "sigmoid", "shared"])
def test_what_was_read_from_fp8_comes_back_bit_for_bit(kind, tmp_path):
    folder, _ = save_fp8(tmp_path / "fp8", kind)
    import_checkpoint(find(folder), tmp_path / "shards", Layout(tensor=2, expert=2), Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", FP8)
    original, found = read_files(folder), read_files(tmp_path / "back")
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: config["quantization_config"][key] for key in SETTINGS} == SETTINGS
    assert config["dtype"] == "bfloat16"


WHOLE_BLOCKS = {"hidden_size": 128, "moe_intermediate_size": 256}


@pytest.mark.parametrize("sizes", [{}, WHOLE_BLOCKS, {"moe_intermediate_size": 1}])
def test_one_rounding_of_each_value_and_the_rest_as_it_was(tmp_path, sizes):
    folder = save_bfloat16(tmp_path / "hf", "softmax", **sizes)
    assert main(["convert", "export", str(folder), str(tmp_path / "out"), "--dtype", "fp8-block"]) == 0
    plain, found = load_file(folder / "model.safetensors"), read_files(tmp_path / "out")
    linear = {name for name, tensor in plain.items() if is_linear(name, tensor.shape)}
    assert found.keys() == plain.keys() | {f"{name}_scale_inv" for name in linear}
    for name, tensor in plain.items():
        if name not in linear:
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            continue
        weight, scale = found[name], found[f"{name}_scale_inv"]
        assert weight.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32
        assert tuple(scale.shape) == tuple(-(-size // BLOCK) for size in tensor.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                largest = tensor[at].double().abs().max()
                gap = (weight[at].double() * scale[i, j].double() - tensor[at].double()).abs().max()
                assert scale[i, j].double() == pytest.approx(float(largest) / 448, rel=1e-7)
                assert gap <= largest / 448 * 16 * (1 + 1e-6)  # half of the step of 32 below 448
    import_checkpoint(find(tmp_path / "out"), tmp_path / "shards", Layout(), Options())
    assert not compare_weights(find(tmp_path / "out"), find(tmp_path / "shards")).differences


def test_a_scale_stands_in_the_file_of_its_weight(tmp_path):
    folder = save_bfloat16(tmp_path / "hf", "softmax")
    for size in (30_000, 60_000, 100_000):
        out = tmp_path / str(size)
        export_checkpoint(find(folder), out, Options(torch.bfloat16, True, max_file_bytes=size, threads=2))
        index = json.loads((out / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            assert index["weight_map"][name.removesuffix("_scale_inv")] == file
        files = sorted(out.glob("*.safetensors"))
        assert len(files) > 3
        for file in files:
            held = load_file(file)
            units = {name.removesuffix("_scale_inv") for name in held}
            assert sum(tensor.nbytes for tensor in held.values()) <= size or len(units) == 1
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_files(out).values())


def test_routers_keep_their_type_and_wide_weights_are_rounded_once(tmp_path):
    folder = save_bfloat16(tmp_path / "hf", "sigmoid")
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    query = "model.layers.1.self_attn.q_proj.weight"
    tensors[query] += torch.randn(tensors[query].shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    export_checkpoint(find(folder), tmp_path / "out", FP8)
    found = read_files(tmp_path / "out")
    assert found["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert found["model.norm.weight"].dtype == found["lm_head.weight"].dtype == torch.bfloat16
    largest = tensors[query][128:, 128:].abs().max()
    assert found[f"{query}_scale_inv"][1, 1] == largest / 448  # of the float32 value, not of its bfloat16


def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path):
    folder = save_bfloat16(tmp_path / "hf", "softmax")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}: a value is not finite.*--dtype bf16"):
        export_checkpoint(find(folder), tmp_path / "out", FP8)
    assert not (tmp_path / "out").exists()


def test_the_names_of_a_published_folder():
    """Qwen3-30B-A3B-FP8: its head, two norms and the router of each of 48 layers are listed, all else linear is FP8."""
    hf = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **dict(num_hidden_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128),
        **dict(intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
        **dict(vocab_size=151936, rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu", norm_topk_prob=True),
        **dict(max_position_embeddings=40960, tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[]),
    }
    rules = family_of(hf).weight_rules(hf)
    names = fp8_names(rules)
    assert len(names) == 48 * (4 + 3 * 128)
    config = quantization_config(rules, names)
    listed = {f"model.layers.{i}.{part}" for i in range(48) for part in ("input_layernorm", "post_attention_layernorm")}
    listed |= {"lm_head"} | {f"model.layers.{i}.mlp.gate" for i in range(48)}
    assert set(config["modules_to_not_convert"]) == listed
    assert len(config["modules_to_not_convert"]) == len(listed)
    assert {key: config[key] for key in SETTINGS} == SETTINGS


def test_rows_move_after_they_are_dequantised(tmp_path):
    """Query rows are regrouped on the way to megatron; scales that stayed behind would be those of other rows."""
    folder, plain = save_fp8(tmp_path / "fp8", "softmax")
    stored = read_files(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored[f"{name}_scale_inv"] = torch.tensor([[1e-3, 4e-3], [16e-3, 64e-3]])
    write_files(folder, {"a.safetensors": stored, "b.safetensors": {}})
    import_checkpoint(find(folder), tmp_path / "shards", Layout(tensor=2), Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    assert torch.equal(read_files(tmp_path / "back")[name], plain_of(stored[name], stored[f"{name}_scale_inv"]))
    assert not torch.equal(read_files(tmp_path / "back")[name], plain[name])
