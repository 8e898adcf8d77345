"""Hugging Face -> shards -> Hugging Face is bitwise in every layout, and a layout's files hold each box once."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from conversions import LAYOUTS
from safetensors.torch import load_file
from tiny_models import KINDS, SAME_MAPPING, save_model

from moerl.convert.compare import compare_weights
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.inspection import inspect_model, kind_of
from moerl.convert.layouts import Layout, pieces_by_ranks
from moerl.convert.places import find
from moerl.errors import ConfigError
from moerl.models.family import family_of
from moerl.models.hf_folder import read_config


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind not in SAME_MAPPING])
def folder(request, tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def layouts_of(folder: Path) -> list[Layout]:
    """Those that the model allows: one without experts has none to share out."""
    if any(rule.is_expert for rule in rules_of(folder)):
        return LAYOUTS
    return [layout for layout in LAYOUTS if layout.expert * layout.expert_tensor == 1]


def rules_of(folder: Path):
    hf = read_config(folder)
    return family_of(hf).weight_rules(hf)


def test_every_layout_comes_back_bit_for_bit(folder, tmp_path):
    original = load_file(folder / "model.safetensors")
    for number, layout in enumerate(layouts_of(folder)):
        shards, back = tmp_path / f"shards{number}", tmp_path / f"back{number}"
        built = import_checkpoint(find(folder), shards, layout, Options())
        assert built is not None
        assert not built.not_finite
        assert len(built.sums) == len(pieces_by_ranks(rules_of(folder), layout))
        place = find(shards)
        assert place.form == "megatron"
        assert not compare_weights(find(folder), place).differences
        export_checkpoint(place, back, Options())
        returned = load_file(back / "model.safetensors")
        assert returned.keys() == original.keys()
        for name, tensor in original.items():
            assert returned[name].dtype == tensor.dtype
            assert torch.equal(returned[name], tensor), (layout, name)


def test_every_box_of_the_model_is_held_once(folder):
    rules = rules_of(folder)
    for layout in layouts_of(folder):
        seen: dict[str, torch.Tensor] = {}
        groups = pieces_by_ranks(rules, layout)
        assert set().union(*groups) == set(range(layout.world_size)), "a rank that holds nothing"
        for piece in itertools.chain.from_iterable(groups.values()):
            counts = seen.setdefault(piece.key, torch.zeros(piece.shape))
            counts[tuple(slice(a, a + b) for a, b in zip(piece.offset, piece.extent, strict=True))] += 1
        for key, counts in seen.items():
            assert torch.equal(counts, torch.ones_like(counts)), (layout, key)


def test_small_files_hold_the_same_and_an_index_says_where(folder, tmp_path):
    original = load_file(folder / "model.safetensors")
    import_checkpoint(find(folder), tmp_path / "shards", Layout(tensor=2), Options(max_file_bytes=20_000, threads=3))
    assert len(list((tmp_path / "shards").glob("rank_*.safetensors"))) > 5
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options(max_file_bytes=30_000, threads=3))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == original.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    for file in files:
        held = load_file(file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 30_000 or len(held) == 1
        for name, tensor in held.items():
            assert torch.equal(tensor, original[name])
            assert index["weight_map"][name] == file.name


def test_transformers_loads_what_comes_back(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    import_checkpoint(find(folder), tmp_path / "shards", layouts_of(folder)[-1], Options())
    export_checkpoint(find(tmp_path / "shards"), tmp_path / "back", Options())
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        first, second = (
            AutoModelForCausalLM.from_pretrained(place)(tokens).logits for place in (folder, tmp_path / "back")
        )
    assert torch.equal(first, second)


def test_inspection_counts_what_transformers_counts(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    found = inspect_model(find(folder))
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert found["parameters"] == sum(p.numel() for p in model.parameters()) + biases
    assert (
        found["parameters"] == sum(found["parameters_by_kind"].values()) == sum(found["parameters_by_dtype"].values())
    )
    rules = rules_of(folder)
    experts = sum(math.prod(rule.megatron_shape()) for rule in rules if rule.is_expert)
    assert found["parameters_by_kind"].get("experts", 0) == experts
    settings = find(folder).family.transformer_kwargs(read_config(folder))
    idle = experts * (1 - settings["moe_router_topk"] / settings["num_moe_experts"]) if experts else 0
    assert found["active_parameters"] == round(found["parameters"] - idle)
    assert {kind_of(rule.megatron_name) for rule in rules} == found["parameters_by_kind"].keys()
    assert found["checksums"] == "none recorded"


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            {"pipeline": 3},
            "--pipeline is 3, but must divide the model's 4 layers; set --last-stage-layers=2, which lea",
        ),
        (
            {"pipeline": 2, "first_stage_layers": 4},
            "4 layers over 2 stages: 4 - 4 in the first leave 0 over 1 stage, b",
        ),
        ({"last_stage_layers": 2}, "--last-stage-layers is 2 with --pipeline=1"),
        ({"expert": 5}, "--expert is 5, but must divide the model's 8 experts"),
        ({"tensor": 4}, "4 tensor-parallel ranks cannot share"),
        ({"expert_tensor": 5}, "5 tensor-parallel ranks cannot share"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path, sizes, told):
    folder = save_model(tmp_path / "hf", "softmax")
    with pytest.raises(ConfigError, match=told):
        import_checkpoint(find(folder), tmp_path / "out", Layout(**sizes), Options())
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.converting").exists()


@pytest.mark.parametrize("sizes", [{"expert": 2}, {"expert_tensor": 2}])
def test_experts_that_are_not_there_are_not_shared_out(tmp_path, sizes):
    folder = save_model(tmp_path / "hf", "dense")
    with pytest.raises(ConfigError, match="the model has no experts"):
        import_checkpoint(find(folder), tmp_path / "out", Layout(**sizes), Options())


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"tensor": 0}, "--tensor is 0"),
        ({"first_stage_layers": 0}, "--first-stage-layers is 0"),
        ({"virtual_pipeline": 2}, "--virtual-pipeline cuts the stages of a pipeline"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes, told):
    with pytest.raises(ConfigError, match=told):
        Layout(**sizes)


UNEVEN = (
    [Layout(pipeline=2, first_stage_layers=first) for first in (1, 2, 3, 4)]
    + [Layout(pipeline=3, last_stage_layers=last) for last in (1, 3)]
    + [Layout(pipeline=3, tensor=2, expert=2, first_stage_layers=1, last_stage_layers=3)]
)


def stages_of(layout: Layout, rules) -> list[set[int]]:
    """The layers of each stage, and where what is not a layer lies, checked beside."""
    held: list[set[int]] = [set() for _ in range(layout.pipeline)]
    for ranks, pieces in pieces_by_ranks(rules, layout).items():
        (stage,) = {rank // layout.stage_ranks for rank in ranks}
        for piece in pieces:
            if found := re.search(r"layers\.(\d+)\.", piece.key):
                held[stage].add(int(found[1]))
            else:
                assert stage == (0 if "embedding." in piece.key else layout.pipeline - 1), piece.key
    return held


@pytest.mark.parametrize("kind", ["dense_first", "latent"])
def test_five_layers_over_two_and_three_stages(tmp_path, kind):
    folder = save_model(tmp_path / "hf", kind, num_hidden_layers=5)
    original, rules = load_file(folder / "model.safetensors"), rules_of(folder)
    for number, layout in enumerate(UNEVEN):
        sizes = [len(layers) for layers in stages_of(layout, rules)]
        assert sizes == layout.split.counts(5)
        assert sorted(set().union(*stages_of(layout, rules))) == list(range(5))
        shards, back = tmp_path / f"shards{number}", tmp_path / f"back{number}"
        import_checkpoint(find(folder), shards, layout, Options())
        told = inspect_model(find(shards))["layout"]
        assert told.get("first_stage_layers") == layout.first_stage_layers
        assert told.get("last_stage_layers") == layout.last_stage_layers
        export_checkpoint(find(shards), back, Options())
        returned = load_file(back / "model.safetensors")
        assert returned.keys() == original.keys()
        assert all(torch.equal(returned[name], tensor) for name, tensor in original.items()), layout


def test_the_command_takes_uneven_stages(tmp_path, capsys):
    from moerl.__main__ import main

    folder, out = save_model(tmp_path / "hf", "softmax", num_hidden_layers=3), tmp_path / "out"
    capsys.readouterr()
    assert main(["convert", "import", str(folder), str(out), "--pipeline", "2"]) != 0
    told = "--pipeline is 2, but must divide the model's 3 layers; set --last-stage-layers=1, which leaves 2 over 1"
    assert told in capsys.readouterr().err
    assert main(["convert", "import", str(folder), str(out), "--pipeline", "2", "--first-stage-layers", "1"]) == 0
    assert stages_of(Layout(pipeline=2, first_stage_layers=1), rules_of(folder)) == [{0}, {1, 2}]
    assert main(["convert", "inspect", str(out)]) == 0
    assert "cut by pp 2, first_stage_layers 1" in " ".join(capsys.readouterr().out.split())
