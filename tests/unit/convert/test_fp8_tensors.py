"""`export --dtype fp8-tensor`: refused with the reason, and where nvidia-modelopt is installed, held to the source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prediction_layers import save_with_prediction
from quantised_folders import is_linear, read_files, save_bfloat16
from safetensors.torch import load_file

from moerl.__main__ import main
from moerl.convert.compare import compare_weights
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.models.hf_export import leftover

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo" / "policy"
OPTIONS = Options(dtype=torch.bfloat16)
TEXTS = [torch.arange(40), torch.arange(53, 0, -1)]


@pytest.fixture(scope="module")
def export():
    reason = "nvidia-modelopt is not installed; it comes with the extra `modelopt`"
    pytest.importorskip("modelopt.torch.quantization", reason=reason)
    from moerl.convert.fp8_tensors import export_fp8_tensors

    return export_fp8_tensors


def test_it_needs_texts_and_modelopt(tmp_path, capsys):
    command = ["convert", "export", str(DEMO), str(tmp_path / "out"), "--dtype", "fp8-tensor"]
    assert main(command) == 2
    assert "--calibration, or use --dtype fp8-block" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--calibration", str(tmp_path / "none.txt")]) == 2
    assert "is no file; name a file with one text a line" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "empty.txt").write_text("\n \n")
    assert main([*command, "--calibration", str(tmp_path / "empty.txt")]) == 2
    assert "which holds no text" in capsys.readouterr().err
    (tmp_path / "latin.txt").write_bytes("1+2=3\ncafé\n".encode("latin-1"))
    assert main([*command, "--calibration", str(tmp_path / "latin.txt")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"--calibration is {tmp_path}/latin.txt, which is not UTF-8: byte 0xe9 at offset 9" in told
    assert "save it as UTF-8 text, one text a line" in told
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2=3"}\n')
    assert main([*command, "--calibration", str(tmp_path / "rows.jsonl")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert 'rows.jsonl, which has the text \'{"prompt": "1+2=3"}\': the model\'s tokenizer cannot encode it' in told
    assert "not JSON of them" in told
    try:
        import modelopt  # noqa: F401
    except ImportError:
        (tmp_path / "text.txt").write_text("1+2=\n")
        assert main([*command, "--calibration", str(tmp_path / "text.txt")]) == 2
        assert "pip install 'moerl[modelopt]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


@pytest.mark.parametrize("kind", ["dense_first", "sigmoid"])
def test_weights_are_the_models_and_routers_their_own(kind, export, tmp_path):
    folder = save_bfloat16(tmp_path / "hf", kind)
    import_checkpoint(find(folder), tmp_path / "shards", Layout(expert=2), Options())
    export(find(tmp_path / "shards"), tmp_path / "out", OPTIONS, TEXTS)
    plain, found = load_file(folder / "model.safetensors"), read_files(tmp_path / "out")
    linear = {name.removesuffix(".weight") for name, tensor in plain.items() if is_linear(name, tensor.shape)}
    scales = {f"{name}.{which}_scale" for name in linear for which in ("weight", "input")}
    assert found.keys() == plain.keys() | scales
    for name, tensor in plain.items():
        if name.removesuffix(".weight") not in linear:
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            continue
        scale = found[f"{name}_scale"].double()
        assert found[f"{name.removesuffix('.weight')}.input_scale"] > 0
        gap = (found[name].double() * scale - tensor.double()).abs().max()
        assert gap <= scale * 17  # half of the step of 32 below 448, and a bfloat16 division before it
    import_checkpoint(find(tmp_path / "out"), tmp_path / "again", Layout(), Options())
    assert not compare_weights(find(tmp_path / "out"), find(tmp_path / "again")).differences
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "FP8"
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "FP8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hf", "out", "shards"]


def test_what_a_killed_export_left_goes(export, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead, living = (leftover(tmp_path / "out", "modelopt").name.split("-") for _ in range(2))
    dead[2], living[2] = str(process.pid), str(os.getppid())
    for name in (dead, living):
        (tmp_path / f"{'-'.join(name)}-abc_12").mkdir()
    export(find(save_bfloat16(tmp_path / "hf", "softmax")), tmp_path / "out", OPTIONS, TEXTS)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [f"{'-'.join(living)}-abc_12", "hf", "out"]


def test_experts_that_no_text_reaches_have_scales_too(export, tmp_path):
    folder = save_bfloat16(tmp_path / "hf", "softmax")
    export(find(folder), tmp_path / "out", OPTIONS, [torch.tensor([7])])
    found = read_files(tmp_path / "out")
    scales = [tensor for name, tensor in found.items() if name.endswith(".input_scale")]
    assert len(scales) == 2 * (4 + 3 * 8)
    assert all(bool(torch.isfinite(scale)) and scale > 0 for scale in scales)


def test_layers_of_multi_token_prediction_stay_plain_and_are_listed(export, tmp_path):
    folder, extra = save_with_prediction(tmp_path / "hf", "sigmoid", is_bfloat16=True)
    import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options())
    export(find(tmp_path / "shards"), tmp_path / "out", OPTIONS, TEXTS)
    found = read_files(tmp_path / "out")
    for name, tensor in extra.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    more = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    for listed in (settings["ignore"], more["exclude_modules"]):
        assert {"model.layers.2.eh_proj", "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.gate"} <= set(listed)
    import_checkpoint(find(tmp_path / "out"), tmp_path / "again", Layout(), Options())
    assert not compare_weights(find(tmp_path / "out"), find(tmp_path / "again")).differences
