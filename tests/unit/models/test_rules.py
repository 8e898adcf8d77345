from __future__ import annotations

import pytest
import torch

from moerl.errors import CheckpointError, ConfigError
from moerl.models.rules import (
    QKV,
    AlternatingGateUp,
    Copy,
    GateUp,
    Transposed,
    Vocab,
    match_parameters,
    padded_vocab_size,
    shift_indices,
)


def numbered(first: int, count: int) -> torch.Tensor:
    """[count, 2]: row i holds (first + i) twice."""
    return torch.arange(first, first + count, dtype=torch.float32).unsqueeze(1).repeat(1, 2)


def rows(tensor: torch.Tensor) -> list[int]:
    return tensor[:, 0].int().tolist()


def make_qkv(heads: int, groups: int, d: int, width: int = 2) -> QKV:
    shapes = ((heads * d, width), (groups * d, width), (groups * d, width))
    return QKV(
        megatron_name="qkv",
        hf_names=("q", "k", "v"),
        hf_shapes=shapes,
        tensor_axis=0,
        num_heads=heads,
        num_query_groups=groups,
        head_dim=d,
    )


def make_gate_up(width: int) -> GateUp:
    shapes = ((width, 2), (width, 2))
    return GateUp(megatron_name="fc1", hf_names=("gate", "up"), hf_shapes=shapes, tensor_axis=0)


def test_qkv_rows_go_by_query_group():
    rule = make_qkv(heads=4, groups=2, d=2)
    tensors = {"q": numbered(0, 8), "k": numbered(100, 4), "v": numbered(200, 4)}
    whole = rule.to_megatron(tensors)
    first = [0, 1, 2, 3, 100, 101, 200, 201]
    second = [4, 5, 6, 7, 102, 103, 202, 203]
    assert rows(whole) == first + second
    assert rows(rule.shard(whole, 0, 2)) == first
    assert rows(rule.shard(whole, 1, 2)) == second


def test_qkv_takes_biases():
    rule = QKV(
        megatron_name="qkv.bias",
        hf_names=("q", "k", "v"),
        hf_shapes=((4,), (2,), (2,)),
        tensor_axis=0,
        num_heads=4,
        num_query_groups=2,
        head_dim=1,
    )
    bias = {"q": torch.arange(4), "k": torch.tensor([10, 11]), "v": torch.tensor([20, 21])}
    whole = rule.to_megatron(bias)
    assert whole.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert {name: tensor.tolist() for name, tensor in rule.to_hf(whole).items()} == {
        "q": [0, 1, 2, 3],
        "k": [10, 11],
        "v": [20, 21],
    }


@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 3, 2), (6, 2, 3), (4, 4, 8)])
def test_qkv_refuses_sizes_that_cut_heads(heads, groups, size):
    rule = make_qkv(heads, groups, d=24)
    whole = rule.to_megatron({n: torch.zeros(s) for n, s in zip(rule.hf_names, rule.hf_shapes, strict=True)})
    with pytest.raises(ConfigError, match=f"qkv: {size} tensor-parallel ranks cannot share {heads} heads in {groups}"):
        rule.shard(whole, 0, size)


def test_gate_and_up_are_sharded_each_on_their_own():
    rule = make_gate_up(4)
    whole = rule.to_megatron({"gate": numbered(0, 4), "up": numbered(100, 4)})
    assert rows(whole) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert rows(rule.shard(whole, 0, 2)) == [0, 1, 100, 101]
    assert rows(rule.shard(whole, 1, 2)) == [2, 3, 102, 103]


def test_a_size_that_does_not_divide_is_refused():
    rule = make_gate_up(6)
    whole = rule.to_megatron({"gate": numbered(0, 6), "up": numbered(0, 6)})
    with pytest.raises(ConfigError, match="fc1: 4 tensor-parallel ranks cannot share 2 x 6 rows of dim 0"):
        rule.shard(whole, 0, 4)


def test_vocabulary_is_padded_with_zeros_and_trimmed():
    rule = Vocab(megatron_name="out", hf_names=("h",), hf_shapes=((5, 2),), tensor_axis=0, multiple=2)
    whole = rule.to_megatron({"h": numbered(1, 5)})
    shards = [rule.shard(whole, rank, 2) for rank in range(2)]
    assert rows(shards[0]) == [1, 2, 3, 4]
    assert rows(shards[1]) == [5, 0, 0, 0]
    assert rows(rule.gather(shards)) == [1, 2, 3, 4, 5]
    assert rule.shard_shape(2) == (4, 2)
    assert rule.megatron_shape() == (5, 2)
    with pytest.raises(CheckpointError, match=r"'out' has shape \[8, 2\]"):
        rule.to_hf(torch.cat(shards))


@pytest.mark.parametrize(
    ("vocab", "multiple", "size", "padded"), [(38, 1, 1, 38), (38, 1, 4, 40), (128, 128, 1, 128), (129, 128, 2, 256)]
)
def test_padded_size(vocab, multiple, size, padded):
    assert padded_vocab_size(vocab, multiple, size) == padded


def test_columns_are_sharded_and_replicas_are_not():
    column = Copy(megatron_name="fc2", hf_names=("down",), hf_shapes=((2, 4),), tensor_axis=1)
    whole = torch.arange(8).reshape(2, 4)
    shards = [column.shard(whole, rank, 2) for rank in range(2)]
    assert shards[1].tolist() == [[2, 3], [6, 7]]
    assert torch.equal(column.gather(shards), whole)
    replica = Copy(megatron_name="norm", hf_names=("norm",), hf_shapes=((4,),))
    norm = torch.arange(4)
    assert torch.equal(replica.shard(norm, 3, 4), norm)
    assert torch.equal(replica.gather([norm] * 4), norm)


def test_missing_and_misshapen_tensors_are_named():
    rule = make_gate_up(3)
    with pytest.raises(CheckpointError, match="tensor 'up' is missing; parameter 'fc1' cannot be filled"):
        rule.to_megatron({"gate": numbered(0, 3)})
    with pytest.raises(CheckpointError, match=r"tensor 'up' has shape \[2, 3\] where config.json implies \[3, 2\]"):
        rule.to_megatron({"gate": numbered(0, 3), "up": numbered(0, 3).T})


def test_indices_shift_once_and_only_where_they_mean_it():
    local = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    shifted = "decoder.layers.5.mlp.experts.local_experts.10.linear_fc1.weight"
    assert shift_indices(local, layers=4, experts=8) == shifted
    assert shift_indices(shifted, layers=-4, experts=-8) == local
    assert shift_indices("output_layer.weight", layers=4, experts=8) == "output_layer.weight"


def test_parameters_and_rules_must_match():
    first, second = make_gate_up(3), Copy(megatron_name="norm", hf_names=("n",), hf_shapes=((1,),))
    assert match_parameters([first, second], ["norm", "fc1"]) == {"norm": second, "fc1": first}
    with pytest.raises(CheckpointError, match="unfilled parameters: no rule of the family makes extra"):
        match_parameters([first], ["fc1", "extra"])
    with pytest.raises(CheckpointError, match="the model lacks parameters that the checkpoint has: norm"):
        match_parameters([first, second], ["fc1"])
    assert match_parameters([first, second], ["fc1"], is_complete=False) == {"fc1": first}


@pytest.mark.parametrize("shape", [(3, 8), (8,)])
def test_columns_of_gate_and_up_in_turn_become_rows_gate_first(shape):
    rule = AlternatingGateUp(megatron_name="fc1", hf_names=("w",), hf_shapes=(shape,), tensor_axis=0)
    stored = torch.arange(8.0).expand(shape).contiguous()  # column c holds c: even ones are the gate's
    whole = rule.to_megatron({"w": stored})
    assert whole.reshape(8, -1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert rule.shard(whole, 1, 2).reshape(4, -1)[:, 0].tolist() == [4, 6, 5, 7]
    back = rule.to_hf(rule.gather([rule.shard(whole, rank, 2) for rank in range(2)]))
    assert torch.equal(back["w"], stored)
    with pytest.raises(ConfigError, match="choose a parallel size that divides 4"):
        rule.shard(whole, 0, 3)


def test_a_matrix_stored_by_inputs_is_turned_and_shared_by_its_inputs():
    rule = Transposed(megatron_name="fc2", hf_names=("w",), hf_shapes=((4, 3),), tensor_axis=1)
    stored = torch.arange(12.0).view(4, 3)
    whole = rule.to_megatron({"w": stored})
    assert torch.equal(whole, stored.t())
    shards = [rule.shard(whole, rank, 2) for rank in range(2)]
    assert torch.equal(shards[1], stored[2:].t())
    assert torch.equal(rule.to_hf(rule.gather(shards))["w"], stored)
    assert rule.shard_shape(2) == (3, 2)
