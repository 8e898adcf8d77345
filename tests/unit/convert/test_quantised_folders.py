"""A folder with FP8 blocks goes wherever a plain one does: imported, exported, verified, inspected, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from prediction_layers import save_fp8_with_prediction
from quantised_folders import SETTINGS, edit_config, is_linear, read_files, save_bfloat16, save_fp8, write_files
from safetensors.torch import load_file

from moerl.__main__ import main
from moerl.convert.compare import compare_forwards, compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError, ConfigError

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module", params=["dense_first", "sigmoid", "shared"])
def fp8(request, tmp_path_factory):
    return save_fp8(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def small(tmp_path) -> Path:
    return save_fp8(tmp_path / "fp8", "softmax")[0]


def edit(folder: Path, **changes) -> None:
    """Set stored tensors; None takes one away."""
    kept = {name: t for name, t in (read_files(folder) | changes).items() if t is not None}
    write_files(folder, {"a.safetensors": kept, "b.safetensors": {}})


def test_import_and_export_give_the_plain_model_that_it_stands_for(fp8, tmp_path):
    folder, plain = fp8
    import_checkpoint(find(folder), tmp_path / "shards", Layout(tensor=2, expert=2), Options(threads=2))
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options(max_file_bytes=200_000))
    export_checkpoint(find(folder), tmp_path / "direct", Options())
    for out in (tmp_path / "back", tmp_path / "direct"):
        found = read_files(out)
        assert found.keys() == plain.keys()
        for name, tensor in plain.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        config = json.loads((out / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in json.loads((tmp_path / "shards" / "config.json").read_text())


def test_verify_sees_one_model_in_both_forms(fp8, tmp_path):
    folder, _ = fp8
    import_checkpoint(find(folder), tmp_path / "shards", Layout(pipeline=2), Options())
    assert not compare_weights(find(folder), find(tmp_path / "shards")).differences
    for second in (tmp_path / "shards", folder):
        said = compare_forwards(find(folder), find(second), num_tokens=24, seed=0)
        assert said.by == ("transformers", "megatron")
        assert said.gap.size < 3e-5  # 1.03e-5 was seen: transformers computes attention and norms in float32 throughout
        assert said.routes_differing == 0 < said.num_routes


def test_verify_sees_one_scale_that_is_another(small, tmp_path):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    scale = read_files(small)[f"{QUERY}_scale_inv"].clone()
    scale[1, 1] *= 2  # rows 128 to 143, columns 128 to 199
    edit(small, **{f"{QUERY}_scale_inv": scale})
    (difference,) = compare_weights(find(small), find(tmp_path / "shards")).differences
    assert difference.name == QUERY
    assert difference.what.startswith("1151 of 28800 values differ") or difference.what.startswith("1152 of")


def test_inspect_says_how_it_is_stored_and_what_is_read(small, capsys):
    assert main(["convert", "inspect", str(small)]) == 0
    told = capsys.readouterr().out
    assert "stored as fp8 in blocks of 128 x 128" in told
    assert main(["convert", "inspect", str(small), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quantised"] == SETTINGS
    assert found["tensors"][QUERY] == {"shape": [144, 200], "dtype": "bfloat16"}
    assert not any("scale" in name for name in found["tensors"])


def test_a_scale_that_the_index_does_not_list_is_told_by_its_shard(small):
    """Not as a weight whose scale is missing: it is there."""
    path = small / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    del weight_map[f"{QUERY}_scale_inv"]
    path.write_text(json.dumps({"weight_map": weight_map}))
    for read in (find(small).open, find(small).carried):
        with pytest.raises(CheckpointError, match=rf"b\.safetensors holds {QUERY}_scale_inv, which .* does not list"):
            read()


def test_mxfp4_comes_out_as_the_plain_folder(tmp_path):
    """gpt-oss stores [e, out, in / 2]; its plain files hold [e, in, out]."""
    folder = save_bfloat16(tmp_path / "hf", "fused", hidden_size=64, intermediate_size=32, moe_intermediate_size=None)
    stored, plain = {}, load_file(folder / "model.safetensors")
    for name, tensor in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        generator = torch.Generator().manual_seed(len(stored))
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 130, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1).flatten(-2)
        rows = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(2)
        plain[name] = rows.transpose(1, 2).to(torch.bfloat16)
    (folder / "model.safetensors").unlink()
    write_files(folder, {"a.safetensors": stored})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    import_checkpoint(find(folder), tmp_path / "shards", Layout(tensor=2, expert=2), Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    found = read_files(tmp_path / "back")
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"FP8: .*experts.0.gate_up_proj holds an expert in a form"):
        export_checkpoint(find(folder), tmp_path / "fp8", Options(dtype=torch.bfloat16, fp8_blocks=True))


@pytest.mark.parametrize(
    ("changes", "config", "told"),
    [
        ({f"{QUERY}_scale_inv": None}, {}, f"float8 tensor '{QUERY}' has no scale"),
        ({QUERY: None}, {}, f"scale '{QUERY}_scale_inv' has no quantised weight"),
        ({f"{QUERY}_scale_inv": torch.ones(2, 1)}, {}, r"has shape \[2, 1\].*allowed: \[2, 2\]"),
        ({f"{QUERY}_scale_inv": torch.ones(144, 1)}, {}, r"has shape \[144, 1\]"),
        ({}, {"quantization_config": {**SETTINGS, "quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({}, {"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({}, {"quantization_config": None}, "config.json has no quantization_config"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(small, tmp_path, changes, config, told):
    edit(small, **changes)
    edit_config(small, **config)
    for convert in (
        lambda place: import_checkpoint(place, tmp_path / "out", Layout(), Options()),
        lambda place: export_checkpoint(place, tmp_path / "out", Options()),
    ):
        with pytest.raises(CheckpointError, match=told):
            convert(find(small))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8"]


CACHE = [
    f"model.layers.{layer}.self_attn.{part}" for layer in range(2) for part in ("k_proj.k_scale", "v_proj.v_scale")
]


def test_scales_of_an_engines_cache_stay_behind_and_are_told(small, tmp_path):
    """As modelopt and compressed-tensors write them where the cache is FP8 too."""
    without = read_files(small)
    import_checkpoint(find(small), tmp_path / "first", Layout(), Options())
    edit(small, **{name: torch.tensor(0.5) for name in CACHE})
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    export_checkpoint(find(small), tmp_path / "plain", Options())
    assert not compare_weights(find(tmp_path / "first"), find(tmp_path / "shards")).differences
    for manifest in (tmp_path / "shards" / "manifest.json", tmp_path / "plain" / "moerl_manifest.json"):
        assert json.loads(manifest.read_text())["unmapped"] == CACHE
    assert json.loads((tmp_path / "first" / "manifest.json").read_text())["unmapped"] == []
    assert read_files(tmp_path / "plain").keys() == {name for name in without if not name.endswith("_scale_inv")}


def test_scales_of_a_cache_beside_plain_weights_are_unmapped(tmp_path):
    save_bfloat16(tmp_path / "hf", "softmax")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors").unlink()
    write_files(tmp_path / "hf", {"a.safetensors": {**tensors, CACHE[0]: torch.tensor(0.5)}})
    with pytest.raises(CheckpointError, match=f"unmapped tensors: {re.escape(CACHE[0])}"):
        find(tmp_path / "hf").open()


def save_modelopt(folder: Path, *, said: dict | None) -> tuple[Path, dict[str, torch.Tensor]]:
    """(folder as older versions of modelopt wrote it: FP8 per tensor, told by a file of its own; plain tensors)."""
    save_bfloat16(folder, "softmax")
    stored, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if is_linear(name, tensor.shape):
            scale = tensor.float().abs().max() / 448
            stored[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            stored |= {f"{name}_scale": scale, f"{name.removesuffix('.weight')}.input_scale": torch.tensor(2.0)}
            plain[name] = (stored[name].float() * scale).to(torch.bfloat16)
    (folder / "model.safetensors").unlink()
    write_files(folder, {"a.safetensors": stored, "b.safetensors": {}})
    if said is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, **said}))
    return folder, plain


def test_modelopts_own_file_says_how_weights_are_stored(tmp_path, capsys):
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    folder, plain = save_modelopt(tmp_path / "fp8", said=said)
    edit(folder, **{name: torch.tensor(0.5) for name in CACHE})
    import_checkpoint(find(folder), tmp_path / "shards", Layout(expert=2), Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    found = read_files(tmp_path / "back")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    for out in ("shards", "back"):
        assert "quantization_config" not in json.loads((tmp_path / out / "config.json").read_text())
        assert not (tmp_path / out / "hf_quant_config.json").exists()
    assert main(["convert", "inspect", str(folder)]) == 0
    assert "modelopt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"quantization": {"quant_algo": "NVFP4"}},
            "hf_quant_config.json has quant_algo 'NVFP4'; of modelopt only 'FP8'",
        ),
        ({"quantization": {"quant_algo": None}}, "hf_quant_config.json has quant_algo None"),
        ({"quantization": []}, "hf_quant_config.json has quant_algo None"),
        (None, "config.json has no quantization_config to say what its scale is"),
    ],
)
def test_what_modelopts_file_may_not_say_is_refused_by_its_name(tmp_path, said, told):
    folder, _ = save_modelopt(tmp_path / "fp8", said=said)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        import_checkpoint(find(folder), tmp_path / "out", Layout(), Options())
    assert not (tmp_path / "out").exists()


def test_modelopts_file_beside_plain_weights_is_told(tmp_path):
    save_bfloat16(tmp_path / "hf", "softmax")
    (tmp_path / "hf" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    told = "hf_quant_config.json says 'modelopt', but no tensor is quantised; remove hf_quant_config.json"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        find(tmp_path / "hf").open()


def test_scales_of_a_cache_stay_behind_with_layers_that_nothing_trains_too(tmp_path):
    folder, plain = save_fp8_with_prediction(tmp_path / "fp8", "sigmoid")
    cache = [f"model.layers.{layer}.self_attn.k_proj.k_scale" for layer in range(4)]
    edit(folder, **{name: torch.tensor(0.5) for name in cache})
    import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options())
    assert json.loads((tmp_path / "shards" / "manifest.json").read_text())["unmapped"] == cache
    for number, options in enumerate((Options(), Options(dtype=torch.bfloat16, fp8_blocks=True))):
        export_checkpoint(find(tmp_path / "shards"), tmp_path / f"out{number}", options)
        assert not any(name.endswith("k_scale") for name in read_files(tmp_path / f"out{number}"))
    assert read_files(tmp_path / "out0").keys() == plain.keys()
