"""Quantised folders read as plain ones, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from moerl.errors import CheckpointError
from moerl.models.fp8 import dequantise_fp8, quantise_fp8_block
from moerl.models.hf_folder import INDEX_FILE, HFFolder, InMemory
from moerl.models.quantised import Dequantised, plain_source, without_quantisation

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 8]}
BLOCK = (4, 8)


def channel(strategy="channel", **more):
    group = {"weights": {"type": "float", "num_bits": 8, "strategy": strategy, **more}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def matrix(rows=10, columns=20, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def blocks(values=None):
    return quantise_fp8_block(matrix() if values is None else values, BLOCK)


def plain(tensors, settings=FP8, **fields):
    return plain_source(InMemory(tensors), {"quantization_config": settings, **fields})


@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
def test_scales_in_another_shard(tmp_path, ending):
    weight, scale = blocks()
    save_file({"a.weight": weight, "norm": torch.ones(3)}, tmp_path / "1.safetensors")
    save_file({f"a.weight{ending}": scale}, tmp_path / "2.safetensors")
    places = {"a.weight": "1.safetensors", "norm": "1.safetensors", f"a.weight{ending}": "2.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    source = plain_source(HFFolder(tmp_path), {"quantization_config": FP8})
    assert source.names() == {"a.weight", "norm"}
    assert source.shape("a.weight") == (10, 20)
    assert source.dtype("a.weight") == torch.bfloat16
    assert torch.equal(source.get("a.weight"), dequantise_fp8(weight, scale, BLOCK))
    assert torch.equal(source.get("norm"), torch.ones(3))
    assert torch.allclose(source.get("a.weight").float(), matrix(), rtol=0.07, atol=0.02)


def test_scales_of_exponents_alone():
    weight, scale = quantise_fp8_block(matrix(), BLOCK, scale_format="ue8m0")
    stored = {"a.weight": weight, "a.weight_scale_inv": scale.to(torch.float8_e8m0fnu)}
    assert torch.equal(plain(stored).get("a.weight"), dequantise_fp8(weight, scale, BLOCK))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    "settings", [FP8, {"quant_method": "fp8"}, {"quant_method": "modelopt", "quant_algo": "FP8"}, channel("tensor")]
)
def test_one_scale_for_a_tensor(shape, settings):
    weight = matrix().to(torch.float8_e4m3fn)
    stored = {
        "a.weight": weight,
        "a.weight_scale": torch.full(shape, 0.5),
        "a.input_scale": torch.tensor(3.0),
    }
    source = plain(stored, settings, torch_dtype="float32")
    assert source.names() == {"a.weight"}
    assert torch.equal(source.get("a.weight"), weight.float() * 0.5)


def test_one_scale_may_have_the_name_of_blocks():
    weight = matrix().to(torch.float8_e4m3fn)
    source = plain({"a.weight": weight, "a.weight_scale_inv": torch.tensor(0.5)}, FP8, torch_dtype="float32")
    assert torch.equal(source.get("a.weight"), weight.float() * 0.5)


@pytest.mark.parametrize("shape", [(10, 1), (10,)])
def test_a_scale_for_each_channel_only_where_the_configuration_says_so(shape):
    weight, scale = matrix().to(torch.float8_e4m3fn), torch.arange(1.0, 11).view(shape).to(torch.bfloat16)
    stored = {"a.weight": weight, "a.weight_scale": scale}
    found = plain(stored, channel(), torch_dtype="float32").get("a.weight")
    assert torch.equal(found, weight.float() * torch.arange(1.0, 11)[:, None])
    with pytest.raises(CheckpointError, match=r"fits no layout .*allowed: \[3, 3\], \[1, 1\]"):
        plain(stored, channel("block", block_structure=[4, 8]))


def test_a_column_of_scales_may_be_blocks():
    weight, scale = quantise_fp8_block(matrix(10, 8), BLOCK)
    assert scale.shape == (3, 1)
    found = plain({"a.weight": weight, "a.weight_scale": scale}, channel("block", block_structure=[4, 8]))
    assert torch.equal(found.get("a.weight"), dequantise_fp8(weight, scale, BLOCK))


def test_fused_experts_are_read_in_parts():
    parts = [blocks(matrix(seed=e)) for e in range(3)]
    stored = {
        "experts.gate_up_proj": torch.stack([weight for weight, _ in parts]),
        "experts.gate_up_proj_scale_inv": torch.stack([scale for _, scale in parts]),
    }
    source = plain(stored)
    whole = torch.stack([dequantise_fp8(*part, BLOCK) for part in parts])
    assert torch.equal(source.get("experts.gate_up_proj"), whole)
    assert torch.equal(source.get_slice("experts.gate_up_proj", 2, 3, 9), whole[2, 3:9])


class Counting(InMemory):
    """Notes what is read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.seen = []

    def get(self, name):
        self.seen.append((name, "all"))
        return super().get(name)

    def get_slice(self, name, expert, start, stop):
        self.seen.append((name, expert, start, stop))
        return super().get_slice(name, expert, start, stop)


def test_a_part_reads_its_rows_and_their_scales_alone():
    parts = [blocks(matrix(rows=22, seed=e)) for e in range(3)]
    stored = {
        "gate_up_proj": torch.stack([weight for weight, _ in parts]),
        "gate_up_proj_scale_inv": torch.stack([scale for _, scale in parts]),
    }
    counting = Counting(stored)
    source = plain_source(counting, {"quantization_config": FP8})
    assert counting.seen == []
    found = source.get_slice("gate_up_proj", 1, 6, 13)
    assert counting.seen == [("gate_up_proj", 1, 6, 13), ("gate_up_proj_scale_inv", 1, 1, 4)]
    assert torch.equal(found, dequantise_fp8(*parts[1], BLOCK)[6:13])


def test_fused_experts_with_one_scale_each():
    weight = torch.stack([matrix(seed=e) for e in range(3)]).to(torch.float8_e4m3fn)
    source = plain({"experts": weight, "experts_scale": torch.tensor([1.0, 2.0, 0.5])}, torch_dtype="float32")
    assert torch.equal(source.get("experts"), weight.float() * torch.tensor([1.0, 2.0, 0.5])[:, None, None])
    assert torch.equal(source.get_slice("experts", 1, 3, 7), weight[1, 3:7].float() * 2)


def test_mxfp4_in_both_orientations():
    generator = torch.Generator().manual_seed(0)
    stored = {
        "down_proj_blocks": torch.randint(0, 256, (2, 64, 2, 16), generator=generator, dtype=torch.uint8),
        "down_proj_scales": torch.randint(120, 130, (2, 64, 2), generator=generator, dtype=torch.uint8),
    }
    settings = {"quant_method": "mxfp4"}
    source = plain(stored, settings)
    as_stored = Dequantised(InMemory(stored), settings, transposes_mxfp4=False)
    assert source.names() == {"down_proj"}
    assert source.shape("down_proj") == (2, 64, 64)  # square: no shape could tell
    whole = as_stored.get("down_proj")
    assert torch.equal(source.get("down_proj"), whole.transpose(1, 2))
    assert torch.equal(source.get_slice("down_proj", 1, 13, 41), whole[1, :, 13:41].T)
    assert torch.equal(as_stored.get_slice("down_proj", 1, 13, 41), whole[1, 13:41])


def test_packed_integers():
    settings = channel("group", group_size=8)
    settings["config_groups"]["group_0"]["weights"] |= {"type": "int", "num_bits": 4, "symmetric": True}
    codes = torch.randint(0, 16, (3, 16), generator=torch.Generator().manual_seed(0))
    words = (codes.view(3, 2, 8) << (4 * torch.arange(8))).sum(2)
    scale = torch.tensor([[1.0, 2.0], [0.5, 4.0], [1.0, 1.0]])
    stored = {
        "a.weight_packed": words.to(torch.int32),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([3, 16]),
    }
    source = plain(stored, settings, torch_dtype="float32")
    assert source.names() == {"a.weight"}
    assert torch.equal(source.get("a.weight"), (codes - 8) * scale.repeat_interleave(8, dim=1))
    with pytest.raises(CheckpointError, match="symmetric"):
        plain(stored | {"a.weight_zero_point": torch.zeros(1)}, settings)
    with pytest.raises(CheckpointError, match=re.escape("int32 [3, 2]")):
        plain(stored | {"a.weight_packed": torch.zeros(3, 3, dtype=torch.int32)}, settings)


def test_packed_integers_are_in_groups_of_the_declared_size():
    stored = {
        "a.weight_packed": torch.zeros(3, 8, dtype=torch.int32),
        "a.weight_scale": torch.ones(3, 2),
        "a.weight_shape": torch.tensor([3, 64]),
    }

    def settings(**weights: object):
        found = channel("group", group_size=32)
        found["config_groups"]["group_0"]["weights"] |= {"type": "int", "num_bits": 4, "symmetric": True, **weights}
        return found

    assert plain(stored, settings()).names() == {"a.weight"}
    told = re.escape("'a.weight_scale' has 2 scales for each row of 64 values") + ".* is "
    with pytest.raises(CheckpointError, match=told + re.escape("16 (4 scales); copy config.json anew")):
        plain(stored, settings(group_size=16))
    with pytest.raises(CheckpointError, match=told + re.escape("one for a row (1 scales)")):
        plain(stored, settings(strategy="channel"))
    with pytest.raises(CheckpointError, match="group_size None with strategy 'group'; a positive integer is needed"):
        plain(stored, settings(group_size=None))
    with pytest.raises(CheckpointError, match=told + "missing"):
        plain(stored, settings(type="float"))
    both = settings(group_size=16)
    both["config_groups"]["group_1"] = settings()["config_groups"]["group_0"]
    assert plain(stored, both).names() == {"a.weight"}


CACHE_SCALES = (
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.v_scale",
    "self_attn.q_scale",
    "self_attn.k_scale",
    "self_attn.v_scale",
    "self_attn.kv_scale",
    "self_attn.prob_scale",
    "self_attn.k_proj.output_scale",
)


@pytest.mark.parametrize("name", CACHE_SCALES)
def test_scales_of_the_cache_are_no_weights(name):
    weight, scale = blocks()
    at = "model.layers.0.self_attn.k_proj.weight"
    stored = {at: weight, f"{at}_scale_inv": scale, f"model.layers.0.{name}": torch.ones(())}
    assert plain(stored).names() == {at}
    assert plain_source(InMemory({"a": torch.ones(2), f"model.layers.0.{name}": torch.ones(())}), {}).names() == {
        "a",
        f"model.layers.0.{name}",  # of a folder that is not quantised they are unknown
    }


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight_scales", "mlp.k_scale", "self_attn.new_scale", "k_scale"])
def test_scales_of_anything_else_are_shown_or_refused(name):
    weight, scale = blocks()
    stored = {"a.weight": weight, "a.weight_scale_inv": scale, f"model.layers.0.{name}": torch.ones(())}
    if name.endswith("_scales"):
        with pytest.raises(CheckpointError, match="has no quantised weight"):
            plain(stored)
        return
    assert plain(stored).names() == {"a.weight", f"model.layers.0.{name}"}


def test_plain_weights_pass_through_and_configurations_lose_the_field():
    source = InMemory({"a": torch.ones(2)})
    assert plain_source(source, {}) is source
    config = {"hidden_size": 4, "quantization_config": FP8, "compression_config": {}}
    assert without_quantisation(config) == {"hidden_size": 4}


WEIGHT, SCALE = blocks()
REFUSED = {
    "no scale": ({"a.weight": WEIGHT}, FP8, "float8 tensor 'a.weight' has no scale"),
    "two scales": ({"a.weight": WEIGHT, "a.weight_scale": SCALE, "a.weight_scale_inv": SCALE}, FP8, "exactly one of"),
    "shape": ({"a.weight": WEIGHT, "a.weight_scale_inv": SCALE[:2]}, FP8, r"shape \[2, 3\].*allowed: \[3, 3\]"),
    "column": ({"a.weight": WEIGHT, "a.weight_scale_inv": torch.ones(10, 1)}, FP8, "fits no layout"),
    "orphan": (
        {"a.weight": matrix(), "a.weight_scale_inv": SCALE},
        FP8,
        "'a.weight_scale_inv' has no quantised weight",
    ),
    "input scale": ({"a.weight": matrix(), "a.input_scale": torch.ones(())}, FP8, "'a.input_scale' has no quantised"),
    "method": ({"a.weight": WEIGHT}, {"quant_method": "awq"}, "quant_method 'awq'.*allowed: fp8"),
    "algorithm": ({"a.weight": WEIGHT}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    "strategy": ({"a.weight": WEIGHT}, channel("token"), "strategy 'token'"),
    "bits": ({"a.weight": WEIGHT}, channel("group", type="int", num_bits=8), "only symmetric 4-bit"),
    "block": ({"a.weight": WEIGHT}, {"quant_method": "fp8", "weight_block_size": [128]}, r"block size \[128\]"),
    "nothing": ({"a.weight": matrix()}, FP8, "no tensor is quantised"),
    "no field": ({"a.weight": WEIGHT, "a.weight_scale_inv": SCALE}, None, "has no quantization_config"),
    "integers": ({"a.weight": WEIGHT, "a.weight_scale_inv": SCALE.int()}, FP8, "is torch.int32; allowed: float32"),
    "e5m2": ({"a.weight": matrix().to(torch.float8_e5m2)}, FP8, "only float8_e4m3fn"),
    "mxfp4": ({"a_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8)}, {"quant_method": "mxfp4"}, "needs a_scales"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    tensors, settings, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        plain(tensors, settings)
