"""Layers of multi-token prediction go from form to form as they are stored, and every command speaks of them."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conversions import LAYOUTS, convert
from prediction_layers import FIELDS, save_fp8_with_prediction, save_with_prediction
from quantised_folders import BLOCK, SETTINGS, edit_config, is_linear, plain_of, read_files, write_files
from safetensors.torch import load_file, save_file
from torch import Tensor

from moerl.__main__ import main
from moerl.convert.building import SPARE_BYTES
from moerl.convert.compare import compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.inspection import inspect_model
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError
from moerl.models.carried import CARRIED_INDEX
from moerl.models.family import PREDICTION, ROTARY
from moerl.models.hf_folder import HFFolder, read_config

EVERY_LAYOUT = ("sigmoid", "latent")
"""GLM-4.5 and DeepSeek-V3; the others have the rules of one of them."""
PREDICTED = ("model.layers.4", "model.layers.5")
FP8 = Options(dtype=torch.bfloat16, fp8_blocks=True)


@pytest.fixture(scope="module", params=FIELDS)
def plain(request, tmp_path_factory) -> Path:
    return save_with_prediction(tmp_path_factory.mktemp(request.param), request.param)[0]


@pytest.fixture
def small(tmp_path) -> Path:
    return save_with_prediction(tmp_path / "hf", "sigmoid")[0]


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def carried_tensors(shards: Path) -> dict[str, Tensor]:
    return {n: t for path in shards.glob("carried_*.safetensors") for n, t in load_file(path).items()}


def test_every_layout_gives_back_the_identical_set_of_tensors(plain, tmp_path):
    """mcore-bridge 93, slime 2131, Megatron-Bridge 5364: lost, two of them mixed up, tied to the model's own."""
    original = read_files(plain)
    assert len([name for name in original if ".eh_proj." in name]) == 2
    few = (LAYOUTS[0], LAYOUTS[-1])
    for number, layout in enumerate(LAYOUTS if plain.name.rstrip("0") in EVERY_LAYOUT else few):
        shards, back = tmp_path / f"shards{number}", tmp_path / f"back{number}"
        import_checkpoint(find(plain), shards, layout, Options(max_file_bytes=500_000))
        assert not compare_weights(find(plain), find(shards)).differences
        export_checkpoint(find(shards), back, Options(max_file_bytes=500_000))
        same(read_files(back), original)
        index = json.loads((back / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == original.keys()


def test_they_lie_in_files_of_their_own_with_checksums_in_the_manifest(small, tmp_path):
    original = read_files(small)
    import_checkpoint(find(small), tmp_path / "shards", Layout(tensor=2), Options(max_file_bytes=50_000))
    own = {path.name: load_file(path) for path in sorted((tmp_path / "shards").glob("carried_*.safetensors"))}
    assert len(own) > 3
    held = {name: tensor for tensors in own.values() for name, tensor in tensors.items()}
    same(
        held,
        {name: tensor for name, tensor in original.items() if name.startswith(PREDICTED)},
    )
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert {*own, CARRIED_INDEX} <= manifest["files"].keys()
    assert manifest["carried"] == {PREDICTION: sorted(held)}
    assert manifest["carried_from"] == str(small)
    assert not manifest["carried_is_older"]
    assert manifest["unmapped"] == []
    for file, tensors in own.items():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 50_000, file


@pytest.mark.parametrize("kind", ["sigmoid", "latent", "wide_sigmoid"])
def test_quantised_ones_keep_their_codes_and_scales(kind, tmp_path):
    folder, plain = save_fp8_with_prediction(tmp_path / "fp8", kind)
    stored = read_files(folder)
    predicted = [name for name in stored if name.startswith(("model.layers.2.", "model.layers.3."))]
    assert any(name.endswith("_scale_inv") for name in predicted)
    for number, layout in enumerate((Layout(), Layout(tensor=2, expert=2, pipeline=2))):
        shards = tmp_path / f"shards{number}"
        import_checkpoint(find(folder), shards, layout, Options(max_file_bytes=200_000))
        same(carried_tensors(shards), {name: stored[name] for name in predicted})
        assert not compare_weights(find(folder), find(shards)).differences
        export_checkpoint(find(shards), tmp_path / f"fp8_{number}", FP8)
        same(read_files(tmp_path / f"fp8_{number}"), stored)
        export_checkpoint(find(shards), tmp_path / f"plain_{number}", Options())
        same(read_files(tmp_path / f"plain_{number}"), plain)
        assert not compare_weights(find(folder), find(tmp_path / f"plain_{number}")).differences
    config = read_config(tmp_path / "fp8_0")["quantization_config"]
    assert {key: config[key] for key in SETTINGS} == SETTINGS
    assert {f"model.layers.{i}.{name}" for i in (2, 3) for name in ("eh_proj", "enorm", "shared_head.head")} <= set(
        config["modules_to_not_convert"]
    )


def test_a_plain_folder_s_become_fp8_as_the_decoder_s_own_layers_do(tmp_path):
    folder, extra = save_with_prediction(tmp_path / "hf", "latent", is_bfloat16=True)
    export_checkpoint(find(folder), tmp_path / "out", FP8)
    found = read_files(tmp_path / "out")
    linear = {name for name, tensor in extra.items() if is_linear(name, tensor.shape)}
    assert {name.split(".", 3)[3] for name in linear} >= {"self_attn.kv_b_proj.weight", "mlp.experts.7.up_proj.weight"}
    for name, tensor in extra.items():
        if name not in linear:
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
            continue
        scale = found[f"{name}_scale_inv"]
        assert tuple(scale.shape) == tuple(-(-size // BLOCK) for size in tensor.shape)
        gap = (plain_of(found[name], scale).float() - tensor.float()).abs().max()
        assert gap <= tensor.float().abs().max() / 448 * 18  # half of e4m3's largest step, and a bfloat16
    listed = set(read_config(tmp_path / "out")["quantization_config"]["modules_to_not_convert"])
    assert listed.isdisjoint(name.removesuffix(".weight") for name in linear)
    assert "model.layers.3.mlp.gate" in listed


def test_blocks_with_other_scales_become_those_that_are_written(tmp_path):
    """A bfloat16 scale is none that `fp8-block` writes: such layers are read and quantised like all others."""
    folder, _ = save_fp8_with_prediction(tmp_path / "fp8", "sigmoid")
    stored = read_files(folder)
    halves = {n: t.to(torch.bfloat16) if n.endswith("_scale_inv") else t for n, t in stored.items()}
    write_files(folder, {"a.safetensors": halves, "b.safetensors": {}})
    import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", FP8)
    found = read_files(tmp_path / "back")
    assert found.keys() == stored.keys()
    scales = [name for name in found if name.endswith("_scale_inv")]
    assert all(found[name].dtype == torch.float32 for name in scales)


def test_types_are_cast_as_the_decoder_s_are_when_asked(small, tmp_path):
    original = read_files(small)
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options(dtype=torch.bfloat16))
    held = carried_tensors(tmp_path / "shards")
    same(held, {name: original[name] for name in held})
    export_checkpoint(find(small), tmp_path / "half", Options(dtype=torch.bfloat16))
    found = read_files(tmp_path / "half")
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        kept = ".mlp.gate." in name
        assert found[name].dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(found[name], tensor if kept else tensor.bfloat16()), name


def test_a_kill_in_the_middle_of_them_and_the_same_command(small, tmp_path):
    out, building = tmp_path / "out", tmp_path / ".out.converting"
    arguments = ("import", small, out, "--max-shard-size", 1000, "--threads", 1)
    process = convert(*arguments)
    while not len(list((building / "folder").glob("carried_*.safetensors"))) > 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    again = convert(*arguments)
    told, faults = again.communicate(timeout=120)
    assert again.returncode == 0, faults
    assert "of them from an earlier start" in told
    export_checkpoint(find(out), tmp_path / "back", Options())
    same(read_files(tmp_path / "back"), read_files(small))


def test_processes_share_their_files(small, tmp_path):
    arguments = ("--max-shard-size", "20KB")
    both = [convert("import", small, tmp_path / "shards", *arguments, world=(rank, 2)) for rank in range(2)]
    for process in both:
        _, faults = process.communicate(timeout=120)
        assert process.returncode == 0, faults
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    same(read_files(tmp_path / "back"), read_files(small))


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "unlisted"])
def test_a_carried_file_that_is_not_what_it_was_is_refused(damage, small, tmp_path, capsys):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    path = tmp_path / "shards" / "carried_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    told = "carried_00000.safetensors does not match its SHA-256"
    if damage == "changed":
        path.write_bytes(data)
    elif damage == "truncated":
        path.write_bytes(data[:-4])
        told = f"carried_00000.safetensors has {len(data) - 4} bytes"
    elif damage == "missing":
        path.unlink()
        told = "carried_00000.safetensors is missing"
    else:
        (tmp_path / "shards" / CARRIED_INDEX).unlink()
        told = f"{CARRIED_INDEX} is missing"
    shards = str(tmp_path / "shards")
    for command in (["export", shards, str(tmp_path / "back")], ["verify", str(small), shards]):
        assert main(["convert", *command]) == 1
        assert told in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "back").exists()
    if damage in ("truncated", "missing"):
        with pytest.raises(CheckpointError, match=r"carried_00000\.safetensors"):
            export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())


def test_a_conversion_that_leaves_them_out_says_so_and_verify_sees_it(small, tmp_path):
    pattern = r"model\.layers\.[45]\..*"
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options(allowed=(pattern,)))
    assert not carried_tensors(tmp_path / "shards")
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert manifest["carried"] == {}
    predicted = [name for name in read_files(small) if name.startswith(PREDICTED)]
    assert manifest["unmapped"] == sorted(predicted)
    verdict = compare_weights(find(small), find(tmp_path / "shards"))
    assert {difference.name for difference in verdict.differences} == set(manifest["unmapped"])
    assert all(difference.what == f"carried only by {small}" for difference in verdict.differences)
    assert not compare_weights(find(small), find(tmp_path / "shards"), allowed=(pattern,)).differences


def test_verify_sees_one_bit_of_them(small, tmp_path):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    tensors = read_files(small)
    name = "model.layers.5.eh_proj.weight"
    tensors[name].view(torch.int32).view(-1)[7] ^= 1
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    (difference,) = compare_weights(find(small), find(tmp_path / "shards")).differences
    assert difference.name == name
    assert difference.what.startswith("1 of 3200 values differ")


def test_inspect_verify_and_list_tell_of_them(small, tmp_path, capsys):
    extra = [tensor for name, tensor in read_files(small).items() if name.startswith(PREDICTED)]
    values = sum(tensor.numel() for tensor in extra)
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    for place in (small, tmp_path / "shards"):
        found = inspect_model(find(place))
        assert found["carried"]["parameters_by_kind"] == {PREDICTION: values}
        assert len(found["carried"]["tensors"]) == len(extra)
        assert found["left_out"] == []
        assert found["parameters"] == sum(math.prod(tensor["shape"]) for tensor in found["tensors"].values())
        assert main(["convert", "inspect", str(place)]) == 0
        assert f"carried as stored, not trained: multi-token prediction, {values:,} values" in capsys.readouterr().out
    assert {"carried_00000.safetensors", CARRIED_INDEX} <= found["files"].keys()
    assert main(["convert", "verify", str(small), str(tmp_path / "shards"), "--no-forward"]) == 0
    assert f"({len(extra)} of them carried, not trained)" in capsys.readouterr().out
    assert main(["convert", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    carriers = {row["family"] for row in rows if "MTP carried (not trained)" in row["covers"]}
    assert carriers == {"deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2"}


def test_rotary_tables_never_change_their_type(small, tmp_path):
    tensors = read_files(small)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    tensors |= {name.format(layer): torch.rand(3) for layer in range(6)}
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options(dtype=torch.bfloat16))
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options(dtype=torch.bfloat16))
    found = read_files(tmp_path / "back")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name.format(layer)], tensors[name.format(layer)]) for layer in range(4))
    manifest = json.loads((tmp_path / "back" / "moerl_manifest.json").read_text())
    assert manifest["carried"][ROTARY] == [name.format(layer) for layer in range(4)]


def test_an_index_of_another_model_is_refused(small, tmp_path):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    edit_config(tmp_path / "shards", num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=r"lists model\.layers\.5\..*, which this model has not; it is damaged"):
        find(tmp_path / "shards").carried()


def test_a_carried_tensor_that_the_index_does_not_list_is_refused(small, tmp_path):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    path = tmp_path / "shards" / CARRIED_INDEX
    index = json.loads(path.read_text())
    del index["weight_map"]["model.layers.4.eh_proj.weight"]
    path.write_text(json.dumps(index))
    told = r"carried_00000\.safetensors holds model\.layers\.4\.eh_proj\.weight, which carried\.safetensors\.index"
    with pytest.raises(CheckpointError, match=told):
        find(tmp_path / "shards").carried()


@pytest.mark.parametrize("metadata", [None, [], {}, {"storage": None}, {"storage": [1]}])
def test_an_index_that_does_not_say_how_they_are_stored_is_refused(small, tmp_path, metadata):
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    path = tmp_path / "shards" / CARRIED_INDEX
    index = {**json.loads(path.read_text()), "metadata": metadata}
    path.write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=rf"{path} has .* under metadata\.storage where .* convert the model again"
    ):
        find(tmp_path / "shards").carried()
    del index["metadata"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{path} has None under metadata\.storage"):
        find(tmp_path / "shards").carried()


def test_a_disk_that_is_too_small_for_them_is_refused_at_once(small, tmp_path, monkeypatch):
    """Their files are planned with the others: room for the model alone is not enough, and nothing is written."""
    place, out = find(small), tmp_path / "out"
    tensors = read_files(small)
    held = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(PREDICTED))
    needed = sum(tensor.nbytes for tensor in tensors.values()) + SPARE_BYTES
    assert 0 < held < needed - SPARE_BYTES
    free = {}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free["bytes"]))
    runs = (
        (lambda: import_checkpoint(place, out, Layout(), Options())),
        (lambda: export_checkpoint(place, out, Options())),
    )
    for run in runs:
        for free["bytes"] in (needed - held, needed - 1):
            with pytest.raises(CheckpointError, match=rf"{out} needs {needed / 1e9:.2f} GB more, and its disk has"):
                run()
            assert [path.name for path in tmp_path.iterdir()] == ["hf"]
        free["bytes"] = needed
        run()
        shutil.rmtree(out)


def test_memory_holds_two_of_them_at_most(small, tmp_path, monkeypatch):
    """The one that is written, and the next one, which is read before the other is let go."""
    alive: dict[int, int] = {}
    seen: list[tuple[str, int]] = []
    read = HFFolder.get

    def counted(folder: HFFolder, name: str) -> Tensor:
        tensor = read(folder, name)
        if name.startswith(PREDICTED):
            number = len(seen)
            alive[number] = tensor.nbytes
            weakref.finalize(tensor.untyped_storage(), alive.pop, number)
            seen.append((name, sum(alive.values())))
        return tensor

    monkeypatch.setattr(HFFolder, "get", counted)
    sizes = [tensor.nbytes for name, tensor in read_files(small).items() if name.startswith(PREDICTED)]
    import_checkpoint(find(small), tmp_path / "shards", Layout(), Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    assert len(seen) == 2 * len(sizes)
    assert sum(sizes) > 10 * max(sizes)
    assert max(held for _, held in seen) <= 2 * max(sizes)
