"""A damaged manifest is told before any work, and `--skip-checksums` helps where the manifest has nothing but sums."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from conversions import save_run
from prediction_layers import save_with_prediction
from safetensors.torch import load_file
from tiny_models import save_model

from moerl.__main__ import main
from moerl.convert.building import Building
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find


def sources(hf: Path, tmp_path: Path) -> list[Path]:
    """A sharded checkpoint and a folder that an export made, with damaged manifests."""
    import_checkpoint(find(hf), tmp_path / "shards", Layout(), Options())
    export_checkpoint(find(hf), tmp_path / "folder", Options())
    for path in (tmp_path / "shards" / "manifest.json", tmp_path / "folder" / "moerl_manifest.json"):
        path.write_text(path.read_text().replace("carried_is_older", "carried_is_alder"))
    return [tmp_path / "shards", tmp_path / "folder"]


def test_where_it_is_needed_nothing_is_begun(tmp_path, capsys, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    damaged = sources(save_with_prediction(tmp_path / "hf", "sigmoid")[0], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Building, "build", never)
        for source, action, more in product(damaged, ("import", "export"), ([], ["--skip-checksums"])):
            assert main(["convert", action, str(source), str(tmp_path / "out"), *more]) == 1
            told = " ".join(capsys.readouterr().err.split())
            assert "manifest.json is damaged (it does not match its own SHA-256)" in told
            assert "use another copy, or move the manifest away" in told
            assert "to read it all the same" not in told
    for number, source in enumerate(damaged):
        next(source.glob("*manifest.json")).unlink()
        assert main(["convert", "export", str(source), str(tmp_path / f"back{number}")]) == 0


def test_where_it_has_sums_alone_skipping_them_helps(tmp_path, capsys):
    for number, source in enumerate(sources(save_model(tmp_path / "hf", "softmax"), tmp_path)):
        out = tmp_path / f"back{number}"
        assert main(["convert", "export", str(source), str(out)]) == 1
        told = " ".join(capsys.readouterr().err.split())
        assert "use another copy, or --skip-checksums to read it all the same" in told
        assert main(["convert", "export", str(source), str(out), "--skip-checksums"]) == 0
        found, wanted = (load_file(path / "model.safetensors") for path in (out, tmp_path / "hf"))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("action", ["import", "export"])
def test_a_run_says_it_by_being_one(tmp_path, action):
    hf = save_with_prediction(tmp_path / "hf", "sigmoid")[0]
    import_checkpoint(find(hf), tmp_path / "shards", Layout(), Options())
    run = save_run(tmp_path / "run", tmp_path / "shards", hf)
    (run / "checkpoints" / "step_000002" / "manifest.json").write_text("{")
    command = ["convert", action, str(run), str(tmp_path / "out")]
    assert main(command) == 1
    assert main([*command, "--skip-checksums"]) == 0
