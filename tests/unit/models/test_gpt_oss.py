"""gpt-oss: experts' orientation against transformers' own layer, MXFP4 files, windows and rotation, refusals."""

from __future__ import annotations

import re
import weakref

import pytest
import torch
from tiny_models import make_model, save_model

from moerl.errors import CheckpointError
from moerl.models.disk import DiskTensor, disk_tensors, fused_stream
from moerl.models.family import family_of
from moerl.models.hf_folder import HFFolder, InMemory, Unfused, checked_source, read_config
from moerl.models.quantised import plain_source
from moerl.models.rules import Copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("gpt_oss"), "fused")


@pytest.fixture(scope="module")
def hf(folder):
    return read_config(folder)


def whole(hf, source, name):
    rule = next(rule for rule in family_of(hf).weight_rules(hf) if rule.megatron_name == name)
    return rule.to_megatron({part: source.get(part) for part in rule.hf_names})


@pytest.mark.parametrize("square", [False, True])
def test_experts_compute_what_transformers_computes(tmp_path, square):
    """Megatron-Bridge 3743 and slime 1840: where f == h no shape tells a transposed matrix from a right one."""
    sizes = {"hidden_size": 28} if square else {}
    model = make_model("fused", **sizes)
    model.save_pretrained(tmp_path)
    hf = read_config(tmp_path)
    source = checked_source(HFFolder(tmp_path), family_of(hf), hf)
    layer, expert, limit = 1, 4, 7.0
    x = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0)) * 9
    at = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
    parts = {name: whole(hf, source, f"{at}.{name}") for name in PARAMETERS}
    gate, up = (x @ parts["linear_fc1.weight"].t() + parts["linear_fc1.bias"]).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    ours = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ parts["linear_fc2.weight"].t() + parts["linear_fc2.bias"]
    chosen = torch.full((5, 1), expert)
    with torch.no_grad():
        theirs = model.model.layers[layer].mlp.experts(x, chosen, torch.ones(5, model.config.num_local_experts))
    assert gate.max() == limit
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


PARAMETERS = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")


def test_mxfp4_files_are_read_by_the_same_rules(hf):
    """Blocks are [e, out, in / 2]; what they say is held to the table of values, written by hand."""
    config = {**hf, "hidden_size": 32, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    family, generator = family_of(config), torch.Generator().manual_seed(1)
    stored: dict[str, torch.Tensor] = {}
    for tensor in disk_tensors(family, config):
        if not re.search(r"experts\.(gate_up|down)_proj$", tensor.name):
            stored[tensor.name] = torch.randn(tensor.shape, generator=generator).bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        size = (experts, outputs, inputs // 32)
        stored[f"{tensor.name}_blocks"] = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
        stored[f"{tensor.name}_scales"] = torch.randint(120, 130, size, generator=generator, dtype=torch.uint8)
    source = checked_source(plain_source(InMemory(stored), config), family, config)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for part, parameter in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        name = f"model.layers.2.mlp.experts.{part}"
        blocks, scales = stored[f"{name}_blocks"][3].long(), stored[f"{name}_scales"][3].float()
        values = torch.stack([table[blocks & 15], table[blocks >> 4]], -1).flatten(-2) * 2 ** (scales - 127)[..., None]
        rows = values.flatten(1)
        expected = torch.cat([rows[0::2], rows[1::2]]) if part == "gate_up_proj" else rows
        made = whole(config, source, f"decoder.layers.2.mlp.experts.local_experts.3.{parameter}.weight")
        assert torch.equal(made.float(), expected)


def test_windows_and_rotation_are_megatrons(hf):
    found = family_of(hf).transformer_kwargs(hf)
    assert hf["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (found["window_size"], found["window_attn_skip_freq"]) == ([4, 0], [1, 0, 1, 0])
    assert (found["position_embedding_type"], found["yarn_rotary_scaling_factor"]) == ("yarn", 4.0)
    assert found["yarn_correction_range_round_to_int"] is False
    full = {**hf, "layer_types": ["full_attention"] * 4}
    assert "window_size" not in family_of(full).transformer_kwargs(full)


def test_fused_tensors_come_when_their_last_part_has_come(folder, hf):
    family, stored = family_of(hf), HFFolder(folder)
    parts = Unfused(stored, family.fused_slices(hf))
    stream = [(name, parts.get(name)) for rule in family.weight_rules(hf) for name in rule.hf_names]
    made = dict(fused_stream(stream, family, hf))
    assert made.keys() == stored.names()
    assert all(torch.equal(tensor, stored.get(name)) for name, tensor in made.items())
    without = [entry for entry in stream if entry[0] != "model.layers.0.mlp.experts.5.down_proj"]
    missing = stored.names() - dict(fused_stream(without, family, hf)).keys()
    assert missing == {"model.layers.0.mlp.experts.down_proj"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_bias": False}, "attention_bias is False"),
        ({"attention_bias": ...}, "attention_bias is missing; defaults are never guessed (allowed: True)"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ({"swiglu_limit": None}, "swiglu_limit is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types is ['full_attention']"),
        ({"layer_types": ["chunked_attention"] * 4}, "or 'full_attention' for each of 4 layers is needed"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"experts_per_token": 2}, "contradict each other"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "of type 'default'"),
        ({"something_new": 3}, "something_new=3 may change what the model computes"),
    ],
)
def test_what_is_not_known_is_refused(hf, changes, told):
    changed = {name: value for name, value in {**hf, **changes}.items() if value is not ...}
    with pytest.raises(CheckpointError, match=re.escape(told)):
        family_of(changed).transformer_kwargs(changed)


def test_a_fused_tensor_of_fewer_experts_is_refused(folder, hf):
    tensors = {name: HFFolder(folder).get(name) for name in HFFolder(folder).names()}
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    with pytest.raises(CheckpointError, match=re.escape(f"fused tensor {name!r} has shape [5, 56]")):
        checked_source(InMemory(tensors | {name: tensors[name][:5]}), family_of(hf), hf)


def test_parts_of_a_fused_tensor_are_not_all_in_memory_beside_it():
    """A layer of the 120b has 4.2 GB in one tensor, and every thread makes one."""
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def get(part: str) -> torch.Tensor:
        nonlocal most
        tensor = torch.full((2, 3), float(part))
        made.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in made))
        return tensor

    parts = tuple(str(e) for e in range(6))
    rule = Copy(megatron_name="w", hf_names=("w",), hf_shapes=((2, 3),))
    whole = DiskTensor("w", (6, 2, 3), rule, parts).make(get)
    assert torch.equal(whole, torch.arange(6.0)[:, None, None].expand(6, 2, 3))
    assert most == 1
