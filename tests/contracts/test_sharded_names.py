"""`models/sharded.py` names and cuts every parameter as megatron's sharded state dict of a built model does."""

from __future__ import annotations

import pytest
import torch
from tiny_models import KINDS, MAPPED, save_model

from moerl.models.family import GPT_ARGUMENTS, YARN_ATTRIBUTES, families
from moerl.models.hf_folder import HFFolder
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


def test_the_learner_reads_shards_as_it_reads_the_folder(built, tmp_path):
    source, weights, _, _ = built
    names, stored = ShardedNames(weights.rules), HFFolder(source.folder)
    shards = []
    for rule in weights.rules:
        whole = rule.to_megatron({name: stored.get(name) for name in rule.hf_names})
        shards += [Shard(p.key, p.shape, p.offset, p.cut(whole).clone()) for p in names.pieces(rule)]
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


@pytest.mark.parametrize("kind", MAPPED)
def test_names_of_families_that_are_only_mapped_are_megatrons(kind, tmp_path):
    """Built of megatron's own layers, which no learner here runs: parameters, shapes, and where they are saved."""
    from moerl.config.schema import ModelSection, ParallelSection
    from moerl.mcore.model import PackedGPTModel, read_source
    from moerl.mcore.parallel import initialize_parallel
    from moerl.mcore.sharding import placements

    # megatron after moerl.mcore, which prepares for it
    from megatron.core.activations import quick_gelu  # isort: skip
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # isort: skip
    from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

    layout = initialize_parallel(ParallelSection(), 0)
    source = read_source(ModelSection(path=str(save_model(tmp_path, kind))))
    rules = source.family.weight_rules(source.hf)
    fields = {key: value for key, value in source.kwargs.items() if key not in GPT_ARGUMENTS | YARN_ATTRIBUTES}
    config = TransformerConfig(
        **{**fields, "activation_func": quick_gelu, "window_size": tuple(fields["window_size"])},
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:  # as `block_spec` has it: the norm before experts is fused nowhere
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    options = {"position_embedding_type": "none", "share_embeddings_and_output_weights": False}
    model = PackedGPTModel(config, spec, source.vocab_size, 64, **options)
    model.true_vocab_size = source.vocab_size
    parameters = dict(model.named_parameters())
    assert {name: tuple(p.shape) for name, p in parameters.items()} == {
        rule.megatron_name: rule.megatron_shape() for rule in rules
    }
    places, names = placements([model], layout), ShardedNames(rules)
    for rule in rules:
        live = parameters[rule.megatron_name].detach()
        shards = places[id(parameters[rule.megatron_name])].shards("weights", live)
        made = [(piece.key, piece.shape, piece.offset, piece.extent) for piece in names.pieces(rule)]
        assert made == [(s.name, s.shape, s.offset, tuple(s.data.shape)) for s in shards], rule.megatron_name


def test_every_family_is_built():
    covered = {
        name
        for kind in {**KINDS, **MAPPED}.values()
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
