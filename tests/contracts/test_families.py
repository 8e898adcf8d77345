"""What every registered model family must keep; a new one adds samples to `tests/shared/family_samples.py`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from family_samples import SAMPLES
from safetensors import safe_open
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.models.disk import disk_tensors
from moerl.models.family import (
    EXACT,
    GPT_ARGUMENTS,
    MAPPING_ONLY,
    UNSUPPORTED,
    WIDE_QK_NORM,
    YARN_ATTRIBUTES,
    families,
    family_of,
)
from moerl.models.hf_config import GENERIC_FIELDS, SAMPLING_FIELDS
from moerl.models.hf_folder import HFFolder, InMemory, Unfused, checked_source, read_config
from moerl.models.rules import Vocab

CASES = [(family, sample) for family in SAMPLES for sample in SAMPLES[family]]


class Checkpoint:
    """A random model as transformers saves it, and as it is in memory."""

    def __init__(self, folder: Path, family: str, sample: str) -> None:
        import transformers

        (architecture,) = families.get(family).traits["architectures"]
        model_class = getattr(transformers, architecture)
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**SAMPLES[family][sample]))
        for name, tensor in model.state_dict().items():
            if "inv_freq" not in name:  # parameters, and the bias of sigmoid routers, which is a buffer
                torch.nn.init.normal_(tensor)
        model.save_pretrained(folder)
        self.folder = folder
        self.in_memory: dict[str, Tensor] = {name: value.detach() for name, value in model.state_dict().items()}
        self.hf = read_config(folder)
        self.family = family_of(self.hf)
        self.rules = self.family.weight_rules(self.hf)
        with safe_open(folder / "model.safetensors", "pt") as file:
            self.on_disk = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        source = Unfused(InMemory(self.on_disk), self.family.fused_slices(self.hf))
        self.by_rule = {name: source.get(name) for name in source.names()}


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("hf"), *request.param)


def test_every_family_has_samples():
    assert set(SAMPLES) == set(families.names())


def test_every_family_says_what_it_covers_and_how_it_was_verified():
    for name in families.names():
        traits = families.get(name).traits
        assert traits["verified"] in (EXACT, MAPPING_ONLY)
        assert traits["covers"]
        assert all(isinstance(word, str) and word for word in traits["covers"])
        assert not set(traits["architectures"]) & UNSUPPORTED.keys()


def test_how_to_sample_is_no_business_of_any_model():
    """What is let through everywhere: transformers keeps it beside the model, and no family's own code reads it."""
    import transformers

    assert transformers.GenerationConfig().to_dict().keys() >= SAMPLING_FIELDS
    marks = {"_attn_implementation_autoset", "auto_map", "tokenizer_class", "unsloth_fixed", "unsloth_version"}
    assert marks <= GENERIC_FIELDS
    pattern = re.compile(rf"config(?:\.|, \")({'|'.join(SAMPLING_FIELDS | marks)})\b")
    seen = 0
    for family in families.names():
        for architecture in families.get(family).traits["architectures"]:
            model_class = getattr(transformers, architecture, None)
            if model_class is None:  # the class of a released folder's own code
                continue
            module = sys.modules[model_class.__module__]
            assert not pattern.findall(inspect.getsource(module)), architecture
            seen += "config.num_hidden_layers" in inspect.getsource(module)
    assert seen > 8


@pytest.mark.parametrize("architecture", sorted(UNSUPPORTED))
def test_what_cannot_be_mapped_is_refused_with_the_reason(architecture):
    with pytest.raises(CheckpointError, match=re.escape(f"({architecture}: {UNSUPPORTED[architecture]})")):
        family_of({"architectures": [architecture]})


def test_names_and_shapes_are_those_transformers_saves(checkpoint):
    made = {tensor.name: tensor.shape for tensor in disk_tensors(checkpoint.family, checkpoint.hf)}
    assert made == {name: tuple(tensor.shape) for name, tensor in checkpoint.on_disk.items()}


def test_every_name_comes_once(checkpoint):
    megatron = [rule.megatron_name for rule in checkpoint.rules]
    hugging_face = [name for rule in checkpoint.rules for name in rule.hf_names]
    assert len(set(megatron)) == len(megatron)
    assert len(set(hugging_face)) == len(hugging_face)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocab_multiple", [1, 16])
def test_join_shard_gather_split_is_bitwise(checkpoint, size, dtype, vocab_multiple):
    stored = {name: tensor.to(dtype) for name, tensor in checkpoint.by_rule.items()}
    returned: dict[str, Tensor] = {}
    for rule in checkpoint.family.weight_rules(checkpoint.hf, vocab_multiple=vocab_multiple):
        whole = rule.to_megatron(stored)
        assert tuple(whole.shape) == rule.megatron_shape()
        shards = [rule.shard(whole, rank, size).clone() for rank in range(size)]
        assert {tuple(shard.shape) for shard in shards} == {rule.shard_shape(size)}
        if rule.tensor_axis is not None and not isinstance(rule, Vocab):
            assert sum(shard.numel() for shard in shards) == whole.numel()
        returned |= rule.to_hf(rule.gather(shards))
    assert list(returned) == [name for rule in checkpoint.rules for name in rule.hf_names]
    written = {
        tensor.name: tensor.make(returned.__getitem__) for tensor in disk_tensors(checkpoint.family, checkpoint.hf)
    }
    assert written.keys() == checkpoint.on_disk.keys()
    for name, tensor in checkpoint.on_disk.items():
        assert written[name].dtype == dtype
        assert torch.equal(written[name], tensor.to(dtype)), name


def test_fused_names_in_memory_read_as_on_disk(checkpoint):
    on_disk = checked_source(HFFolder(checkpoint.folder), checkpoint.family, checkpoint.hf)
    in_memory = checked_source(InMemory(checkpoint.in_memory), checkpoint.family, checkpoint.hf)
    needed = {name for rule in checkpoint.rules for name in rule.hf_names}
    assert on_disk.names() == needed
    assert needed <= in_memory.names()
    for name in needed:
        assert torch.equal(in_memory.get(name), on_disk.get(name)), name
        assert in_memory.shape(name) == on_disk.shape(name)


def test_settings_are_plain_values_that_megatron_knows(checkpoint):
    settings = checkpoint.family.transformer_kwargs(checkpoint.hf)
    assert json.loads(json.dumps(settings)) == settings
    # read, not imported: megatron must not be imported before the CPU stand-ins are in place
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    core = Path(next(iter(spec.submodule_search_locations))) / "core"
    classes = ("TransformerConfig", "MLATransformerConfig" if settings.get("multi_latent_attention") else None)
    settings_file = core / "transformer" / "transformer_config.py"
    known = {field for name in classes if name for field in _class_fields(settings_file, name)}
    known |= YARN_ATTRIBUTES if settings["position_embedding_type"] == "yarn" else set()
    known |= _class_fields(core / "model_parallel_config.py", "ModelParallelConfig")
    gpt = _constructor_arguments(core / "models" / "gpt" / "gpt_model.py", "GPTModel")
    assert settings.keys() - GPT_ARGUMENTS - {WIDE_QK_NORM} <= known
    assert settings.keys() & GPT_ARGUMENTS <= gpt
    assert len(settings["moe_layer_freq"]) == settings["num_layers"]


def _class_node(path: Path, name: str) -> ast.ClassDef:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _class_fields(path: Path, name: str) -> set[str]:
    nodes = [node for node in _class_node(path, name).body if isinstance(node, ast.AnnAssign)]
    return {node.target.id for node in nodes if isinstance(node.target, ast.Name)}


def _constructor_arguments(path: Path, name: str) -> set[str]:
    functions = [node for node in _class_node(path, name).body if isinstance(node, ast.FunctionDef)]
    return {argument.arg for node in functions if node.name == "__init__" for argument in node.args.args}
