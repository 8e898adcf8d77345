"""Folders that bring code of their own: nobody runs it, nobody is asked whether to, and the way on is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantised_folders import edit_config, save_fp8
from tiny_models import save_model

from moerl.__main__ import main
from moerl.convert.fp8_tensors import calibration_tokens
from moerl.errors import CheckpointError
from moerl.types import WeightBucket
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.version_folder import VersionFolder

CODE = """
from pathlib import Path
Path(__file__).with_name("it_ran").touch()
raise SystemExit(7)
"""
AUTO_MAP = {"AutoConfig": "code.Odd", "AutoModel": "code.Odd", "AutoModelForCausalLM": "code.Odd"}


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch, tmp_path):
    """A question on the terminal would be a failure, a copy of the code would land in a folder of the test."""

    def asked(prompt: object = "") -> str:
        raise AssertionError(f"asked on the terminal: {prompt}")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def with_code(folder: Path, **fields: object) -> Path:
    (folder / "code.py").write_text(CODE)
    edit_config(folder, auto_map=AUTO_MAP, **fields)
    return folder


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "make", [lambda path: save_model(path, "latent"), lambda path: save_fp8(path, "latent", head_dim=None)[0]]
)
def test_a_model_type_that_transformers_lacks_is_told_with_the_way_on(make, tmp_path, capsys):
    folder = with_code(make(tmp_path / "hf"), model_type="kimi_k2")
    command = ["convert", "verify", str(folder), str(folder)]
    assert main(command) == 1
    message = told(capsys)
    assert "transformers cannot build model_type 'kimi_k2'" in message
    assert "verify --no-forward" in message
    assert main([*command, "--no-forward"]) == 0
    assert not list(tmp_path.rglob("it_ran"))


def test_a_model_that_transformers_has_is_run_by_its_own_code(tmp_path):
    folder = with_code(save_model(tmp_path / "hf", "latent"))
    assert main(["convert", "verify", str(folder), str(folder), "--tokens", "4"]) == 0
    assert not list(tmp_path.rglob("it_ran"))


def test_code_and_vocabulary_go_from_form_to_form(tmp_path):
    """What `auto_map` names is there wherever config.json goes, also in a version for servers."""
    folder = with_code(save_model(tmp_path / "hf", "latent"))
    (folder / "tiktoken.model").write_bytes(b"IQ== 0\n")
    shards, back = tmp_path / "shards", tmp_path / "back"
    assert main(["convert", "import", str(folder), str(shards)]) == 0
    assert main(["convert", "export", str(shards), str(back)]) == 0
    for made in (shards, back):
        assert json.loads((made / "config.json").read_text())["auto_map"] == AUTO_MAP
        assert (made / "code.py").read_text() == CODE
        assert (made / "tiktoken.model").read_bytes() == b"IQ== 0\n"
    versions = VersionFolder(SenderPlace(tmp_path / "versions", folder))
    versions.write(WeightBucket(1, [("w", torch.zeros(2))], is_last=True, checksum=None))
    assert (versions.finish(1) / "code.py").read_text() == CODE
    assert not list(tmp_path.rglob("it_ran"))


def test_a_tokenizer_of_the_folders_own_code_is_not_run(tmp_path):
    folder = with_code(save_model(tmp_path / "hf", "latent"), model_type="kimi_k2")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    settings = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["code.Odd", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "texts").write_text("1+2=\n")
    with pytest.raises(CheckpointError, match=rf"{folder}: no tokenizer that can be loaded .* --dtype fp8-block"):
        calibration_tokens(tmp_path / "texts", folder)
    assert not list(tmp_path.rglob("it_ran"))
