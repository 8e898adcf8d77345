"""What the commands promise and no other test of this folder holds: memory, options, the time left, no old files."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_model

from moerl.__main__ import main
from moerl.convert import show
from moerl.convert.building import Building
from moerl.convert.compare import compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.models.hf_folder import HFFolder
from moerl.shards import ShardReader

AXES = ("tensor", "pipeline", "virtual-pipeline", "expert", "expert-tensor")


class Killed(BaseException):
    pass


def test_a_parameter_of_a_checkpoint_that_nothing_is_made_of_is_refused(tmp_path):
    """The way back: a tied model has no head of its own, so the one that lies there would be lost."""
    import_checkpoint(find(save_model(tmp_path / "hf", "softmax")), tmp_path / "shards", Layout(), Options())
    path = tmp_path / "shards" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"unmapped tensors: weights/output_layer\.weight"):
        export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    assert not (tmp_path / "back").exists()


def test_files_of_another_source_under_the_same_name_are_not_gone_on_from(tmp_path, monkeypatch):
    """Between a kill and the same command the weights were written anew: half of either would be no model."""
    hf, made, make = save_model(tmp_path / "hf", "mixtral"), [], Building._make

    def limited(self, number, *rest):
        if len(made) == 6:
            raise Killed
        made.append(number)
        return make(self, number, *rest)

    small = Options(max_file_bytes=16_000)
    with monkeypatch.context() as patch:
        patch.setattr(Building, "_make", limited)
        with pytest.raises(Killed):
            import_checkpoint(find(hf), tmp_path / "out", Layout(), small)
    save_model(tmp_path / "hf", "mixtral", seed=9)
    built = import_checkpoint(find(hf), tmp_path / "out", Layout(), small)
    assert built.num_resumed == 0
    assert not compare_weights(find(hf), find(tmp_path / "out")).differences


@pytest.mark.parametrize("reader", [HFFolder, ShardReader])
def test_no_more_than_some_tensors_are_in_memory_at_once(tmp_path, monkeypatch, reader):
    hf = save_model(tmp_path / "hf", "softmax")
    import_checkpoint(find(hf), tmp_path / "shards", Layout(tensor=2), Options())
    sizes = [tensor.nbytes for tensor in load_file(hf / "model.safetensors").values()]
    alive, most, method = {}, [0], "get" if reader is HFFolder else "read"
    read = getattr(reader, method)

    def counted(*arguments, **options):
        tensor = read(*arguments, **options)
        key = len(most)
        alive[key] = tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), alive.pop, key)
        most.append(sum(alive.values()))
        return tensor

    monkeypatch.setattr(reader, method, counted)
    if reader is HFFolder:
        import_checkpoint(find(hf), tmp_path / "again", Layout(tensor=2), Options())
        export_checkpoint(find(hf), tmp_path / "back", Options())
    else:
        export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    assert len(most) > len(sizes) / 2
    assert max(most) <= 4 * max(sizes) < sum(sizes) / 4


def test_every_option_reaches_what_is_made(tmp_path):
    hf = save_model(tmp_path / "hf", "softmax")
    weights = {**load_file(hf / "model.safetensors"), "x": torch.ones(1)}
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    sizes = [word for axis in AXES for word in (f"--{axis}", "2")]
    options = [*sizes, "--dtype", "bf16", "--allow-unmapped", "x", "--overwrite"]
    assert main(["convert", "import", str(hf), str(tmp_path / "out"), *options]) == 0
    state = json.loads((tmp_path / "out" / "rank_00000.json").read_text())
    assert state["layout"] == Layout(tensor=2, pipeline=2, virtual_pipeline=2, expert=2, expert_tensor=2).described()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["allow_unmapped"] == ["x"]
    assert main(["convert", "export", str(tmp_path / "out"), str(tmp_path / "back"), "--dtype", "fp32"]) == 0
    made = load_file(tmp_path / "back" / "model.safetensors")["lm_head.weight"]
    assert made.dtype == torch.float32
    assert torch.equal(made, weights["lm_head.weight"].bfloat16().float()), "and so it was bfloat16 in between"


def test_progress_is_bytes_with_the_time_left(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: clock[0])
    with show.ByteProgress("import out") as bar:
        bar.begin(10_000_000_000, 2_000_000_000)
        clock[0] = 20.0
        bar.advance(2_000_000_000)
    assert capsys.readouterr().err == "import out: 4.0 of 10.0 GB, 0.10 GB/s, 60 s left\n"
