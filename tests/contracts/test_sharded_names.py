"""`models/sharded.py` names and cuts every parameter as megatron's sharded state dict of a built model does."""

from __future__ import annotations

import re

import pytest
import torch
from tiny_models import KINDS, save_model

from moerl.errors import CheckpointError
from moerl.models.family import families
from moerl.models.hf_folder import HFFolder, Unfused
from moerl.models.rules import Copy, GateUp, Vocab
from moerl.models.sharded import ShardedFolder, ShardedNames, _boxes
from moerl.shards import Shard, write_rank


@pytest.fixture(scope="module", params=KINDS)
def built(request, tmp_path_factory):
    from moerl.config.schema import ModelSection, ParallelSection, PrecisionSection
    from moerl.mcore.model import build_chunks, read_source, transformer_config
    from moerl.mcore.parallel import initialize_parallel
    from moerl.mcore.weights import WeightMap

    folder = save_model(tmp_path_factory.mktemp(request.param), request.param)
    layout = initialize_parallel(ParallelSection(), 0)
    section = ModelSection(path=str(folder))
    source = read_source(section)
    config = transformer_config(source, section=section, precision=PrecisionSection(), parallel=layout)
    chunks = build_chunks(source, config, layout)
    weights = WeightMap(source, chunks, layout)
    return source, weights, chunks, layout


def test_names_shapes_and_boxes_are_megatrons(built):
    from moerl.mcore.sharding import placements

    _, weights, chunks, layout = built
    places = placements(chunks, layout)
    names = ShardedNames(weights.rules)
    for rule in weights.rules:
        live = weights.local[rule.megatron_name]
        wanted = [
            (s.name, s.shape, s.offset, tuple(s.data.shape)) for s in places[id(live)].shards("weights", live.detach())
        ]
        made = [(piece.key, piece.shape, piece.offset, piece.extent) for piece in names.pieces(rule)]
        assert made == wanted, rule.megatron_name


def test_a_parameter_that_no_rule_fills_keeps_nothing_that_was_there(built, monkeypatch):
    """Megatron-LM 5844: it would train on from its first random values. Here it is no number before anything loads."""
    _, weights, _, _ = built
    left_out = weights.rules[-1].megatron_name
    before = weights.local[left_out].detach().clone()
    monkeypatch.setattr(weights, "rules", weights.rules[:-1])
    with pytest.raises(CheckpointError, match="unfilled or not finite after loading") as caught:
        weights.load_hf()
    assert left_out in str(caught.value)
    weights.local[left_out].data.copy_(before)


EXPERT = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
"""TransformerEngine's grouped product has `weight0`, `weight1` ... (megatron/core/extensions/transformer_engine.py)."""


def test_names_of_transformer_engines_layers_are_those_of_the_local_ones(built):
    """Megatron saves local norms under the names of the fused ones, so what it saves is what TransformerEngine has."""
    from moerl.mcore.sharding import placements
    from moerl.mcore.te_names import local_name

    _, weights, chunks, layout = built
    places = placements(chunks, layout)
    num_renamed = 0
    for name, live in weights.local.items():
        if (found := EXPERT.fullmatch(name)) is not None:
            there = f"{found[1]}.{found[3]}.{found[4]}{found[2]}"
        else:
            (key,) = {shard.name for shard in places[id(live)].shards("", live.detach())}
            key = key.removeprefix("/")
            layer = re.search(r"layers\.\d+\.", name)
            there = re.sub(r"layers\.(\d+\.)?", layer[0], key, count=1) if layer else key
        assert local_name(there) == local_name(name) == name
        num_renamed += there != name
    assert num_renamed


def test_the_learner_reads_shards_as_it_reads_the_folder(built, tmp_path):
    source, weights, _, _ = built
    names = ShardedNames(weights.rules)
    stored = Unfused(HFFolder(source.folder), source.family.fused_slices(source.hf))
    shards = []
    for rule in weights.rules:
        whole = rule.to_megatron({name: stored.get(name) for name in rule.hf_names})
        parts = ((p, p.cut(whole).clone(memory_format=torch.contiguous_format)) for p in names.pieces(rule))
        shards += [Shard(p.key, p.shape, p.offset, part) for p, part in parts]
    write_rank(tmp_path, 0, shards, {"world_size": 1}, {})
    again = ShardedFolder(tmp_path, weights.rules)
    assert again.names() == stored.names()
    for name in stored.names():
        assert torch.equal(again.get(name), stored.get(name)), name
        assert (again.shape(name), again.dtype(name)) == (stored.shape(name), stored.dtype(name))
    weights.load_hf()
    first = {name: tensor.detach().clone() for name, tensor in weights.local.items()}
    (tmp_path / "config.json").write_bytes((source.folder / "config.json").read_bytes())
    weights.load_hf(type(source)(tmp_path, source.hf, source.family))
    for name, tensor in weights.local.items():
        assert torch.equal(tensor, first[name]), name


def test_every_family_is_built():
    covered = {
        name
        for kind in KINDS.values()
        for name in families.names()
        if kind.architecture in families.get(name).traits["architectures"]
    }
    assert covered == set(families.names())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_boxes_of_all_ranks_cover_a_parameter_once(size):
    common = {"megatron_name": "w", "hf_names": ("a",)}
    rules = [
        Copy(**common, hf_shapes=((8, 12),), tensor_axis=1),
        Vocab(**common, hf_shapes=((9, 4),), tensor_axis=0, multiple=2),
        GateUp(megatron_name="w", hf_names=("g", "u"), hf_shapes=((8, 3), (8, 3)), tensor_axis=0),
    ]
    for rule in rules:
        shape = rule.megatron_shape()
        seen = torch.zeros(shape)
        whole = torch.arange(seen.numel(), dtype=torch.float32).view(shape)
        for rank in range(size):
            parts = []
            for start, extent in _boxes(rule, shape, rank, size):
                window = tuple(slice(a, a + b) for a, b in zip(start, extent, strict=True))
                seen[window] += 1
                parts.append(whole[window])
            shard = rule.shard(whole, rank, size)
            held = torch.cat(parts, dim=rule.tensor_axis)
            assert torch.equal(shard.narrow(rule.tensor_axis, 0, held.shape[rule.tensor_axis]), held)
        assert torch.equal(seen, torch.ones(shape))
