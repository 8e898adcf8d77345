"""Published models by their config.json: parameters as published, and every tensor that transformers would have."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from published_models import MODELS

from moerl.models.disk import disk_tensors
from moerl.models.family import family_of
from moerl.models.hf_folder import InMemory, checked_source


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_published(name):
    model = MODELS[name]
    family = family_of(model.config)
    settings = family.transformer_kwargs(model.config)
    total = active = 0.0
    for rule in family.weight_rules(model.config):
        count = math.prod(rule.megatron_shape())
        total += count
        if not rule.megatron_name.startswith(model.not_active):
            active += count * (settings["moe_router_topk"] / settings["num_moe_experts"] if rule.is_expert else 1)
    assert total / 1e9 == pytest.approx(model.total, rel=0.01)
    assert active / 1e9 == pytest.approx(model.active, rel=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_that_transformers_has_is_read_under_the_hub_s_names(name):
    """The model without memory for its weights; the names are those of the hub's index, one tensor for each expert."""
    import transformers

    config = MODELS[name].config
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(config))
    family = family_of(config)
    state = {key: tensor for key, tensor in model.state_dict().items() if "inv_freq" not in key}
    source = checked_source(InMemory(state), family, config)
    assert source.names() == {name for rule in family.weight_rules(config) for name in rule.hf_names}
    named = {tensor.name: tensor.shape for tensor in disk_tensors(family, config)}
    last = f"model.layers.{int(config['num_hidden_layers']) - 1}.mlp.experts"
    if family.is_fused_on_disk:
        assert named == {key: tuple(tensor.shape) for key, tensor in state.items()}
    else:
        experts = int(config.get("num_experts") or config["n_routed_experts"])
        assert f"{last}.{experts - 1}.down_proj.weight" in named
    assert sum(tensor.numel() for tensor in state.values()) == sum(math.prod(shape) for shape in named.values())


def test_planning_a_conversion_imports_no_compiler():
    """Joining tensors of the meta device would, which takes longer than converting a gigabyte."""
    code = (
        "import sys\n"
        "from moerl.convert.layouts import Layout, pieces_by_ranks\n"
        "from moerl.models.family import family_of\n"
        f"config = {MODELS['Qwen3-30B-A3B'].config!r}\n"
        "pieces_by_ranks(family_of(config).weight_rules(config), Layout(expert=8, tensor=2))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
